"""Runs an unmodified program twice on two CPU ranks, without ours and with it, and compares what both have trained.

    LOOP = Program(name="a loop", words=[script("loop.py"), "{out}"], environment="lightning", packages=["lightning"])

    def test_loop(tmp_path: Path) -> None:
        run_both(LOOP, tmp_path).assert_trained(steps=6, within=1e-8)

An environment other than the project's is environments/NAME.sh, which `make test-programs` runs once.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.support.deadlines import LONG_S
from tests.support.leftovers import environment as finds_the_package

OUT = Path(__file__).parents[2] / "out" / "programs"
RESULTS = OUT / "results.json"
PROJECT = ".venv"  # as an environment: that of these tests

# Launchers are what python is given before the program.
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
ALONE = ()
WITH_ODC = ("-m", "odc_triton.run", "--strict")

_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "CUDA_VISIBLE_DEVICES": ""}
_MARK = "ODC_TEST_PROGRAM"  # in the environment of all processes of a run


def script(name: str) -> str:
    return str(Path(__file__).parent / "scripts" / name)


def accelerate(config: str, *options: str) -> tuple[str, ...]:
    """accelerate's launcher, with a file of scripts/, at a free port."""
    start = ("-m", "accelerate.commands.launch", "--config_file", script(config), "--main_process_port", "0")
    return *start, *options


@dataclass(frozen=True, kw_only=True)
class Program:
    """`words`: a script and its arguments, or -m, a module and its. In them {out} is the folder of the run. `weights`:
    where in it the program saves them, by the first pattern that fits: safetensors, torch.save's or folders of DCP.
    `start`: of the safetensors with which training begins, if they are a file's.

    A program that has a line of ours itself, instead of -m odc_triton.run before it, says so by `words_with_odc`.
    """

    name: str
    words: Sequence[str]
    words_with_odc: Sequence[str] | None = None
    launcher: Sequence[str] = TORCHRUN
    environment: str = PROJECT
    weights: Sequence[str] = ("**/*.safetensors", "**/*.pt")
    start: Path | None = None
    packages: Sequence[str] = ()  # whose versions are recorded, besides torch's
    variables: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = LONG_S


@dataclass(frozen=True, kw_only=True)
class Run:
    """`seconds` with the start. Minibatches and waits are those that rank 0's last line says, of all models."""

    program: Program
    folder: Path
    seconds: float
    output: str
    minibatches: int
    waits: int

    def weights(self) -> dict[str, torch.Tensor]:
        return read_weights(self.folder, self.program.weights)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """`difference`: the largest of all weights, between the runs without ours and with it; `moved`: since the start, if
    that is known.
    """

    program: str
    versions: dict[str, str]
    difference: float
    moved: float | None
    seconds_plain: float
    seconds_odc: float
    minibatches: int
    waits: int

    def assert_trained(self, *, steps: int, within: float) -> None:
        """One minibatch an optimizer step, two waits each, and the weights of the run without ours."""
        assert (self.minibatches, self.waits) == (steps, 2 * steps)
        assert self.difference <= within
        assert self.moved is None or self.moved > 1000 * within


def run_both(program: Program, folder: Path) -> Outcome:
    return compared(program, run(program, folder / "plain"), run(program, folder / "odc", with_odc=True))


def compared(program: Program, plain: Run, odc: Run) -> Outcome:
    """Also appended to results.json."""
    outcome = Outcome(
        program=program.name,
        versions=versions(program),
        difference=largest_difference(plain.weights(), odc.weights()),
        moved=largest_difference(read_weights(program.start), plain.weights()) if program.start else None,
        seconds_plain=plain.seconds,
        seconds_odc=odc.seconds,
        minibatches=odc.minibatches,
        waits=odc.waits,
    )
    before = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps([*before, {"at": time.time()} | asdict(outcome)], indent=1) + "\n")
    return outcome


def assert_goes_on(program: Program, folder: Path, resume: Callable[[Path], Sequence[str]], *, within: float) -> None:
    """Each way trains as the other, and continues from what the other saved after half of six steps, by the words
    `resume` of its folder.
    """
    plain, odc = run(program, folder / "plain"), run(program, folder / "odc", with_odc=True)
    compared(program, plain, odc).assert_trained(steps=6, within=within)
    from_plain, from_odc = (
        replace(program, name=f"{program.name}, continued", words=[*program.words, *resume(first.folder)])
        for first in (plain, odc)
    )
    then_odc = run(from_plain, folder / "plain, odc", with_odc=True)
    compared(from_plain, plain, then_odc).assert_trained(steps=3, within=within)
    then_plain = run(from_odc, folder / "odc, plain")
    assert largest_difference(plain.weights(), then_plain.weights()) <= within


def run(program: Program, folder: Path, *, with_odc: bool = False) -> Run:
    """Runs it once, in `folder`, which is made. Raises if it fails; none of its processes stays."""
    folder.mkdir(parents=True, exist_ok=True)
    words = [*(WITH_ODC if with_odc else ()), *program.words]
    if with_odc and program.words_with_odc is not None:
        words = [*program.words_with_odc]
    command = [str(interpreter(program.environment)), *program.launcher, *words]
    command = [word.replace("{out}", str(folder)) for word in command]
    mark, log, start_s = uuid.uuid4().hex, folder / "output.log", time.monotonic()
    variables = finds_the_package() | _OFFLINE | program.variables | {_MARK: mark}
    with log.open("w") as output:
        try:
            given = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
            status = subprocess.run(command, cwd=folder, env=variables, timeout=program.timeout_s, **given).returncode
        except subprocess.TimeoutExpired:
            status = f"nothing after {program.timeout_s:g} s"
        finally:
            for process in psutil.process_iter(["environ"]):  # launchers put ranks into sessions of their own
                if (process.info["environ"] or {}).get(_MARK) == mark:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
    seconds, said = time.monotonic() - start_s, log.read_text(errors="replace")
    assert status == 0, f"{' '.join(command)}: {status}\n{_tail(said)}"
    last = "".join(re.findall(r"odc-triton: .*(?:by on-demand|by plain|nothing was).*", said)[-1:])
    minibatches, waits = (sum(map(int, re.findall(rf"(\d+) {word}", last))) for word in ("minibatch", "wait"))
    return Run(program=program, folder=folder, seconds=seconds, output=said, minibatches=minibatches, waits=waits)


def read_weights(folder: Path, patterns: Sequence[str] = ("*.safetensors",)) -> dict[str, torch.Tensor]:
    paths = next(filter(None, (sorted(folder.glob(pattern)) for pattern in patterns)), [])
    assert paths, f"no {' or '.join(patterns)} in {folder}"
    return {name: value for path in paths for name, value in _read(path).items()}


def _read(path: Path) -> dict[str, torch.Tensor]:
    if path.suffix == ".safetensors":
        return load_file(path)
    if path.is_dir():
        with TemporaryDirectory() as folder:
            dcp_to_torch_save(path, whole := f"{folder}/whole")
            return _read(Path(whole))["model"]
    return torch.load(path, weights_only=True, map_location="cpu")


def largest_difference(plain: Mapping[str, torch.Tensor], odc: Mapping[str, torch.Tensor]) -> float:
    assert plain.keys() == odc.keys()
    assert all(value.isfinite().all() for value in plain.values())
    return max((plain[name].double() - odc[name].double()).abs().max().item() for name in plain)


def interpreter(environment: str) -> Path:
    """Of the environment. Where that could not be installed the test is skipped."""
    if environment == PROJECT:
        return Path(sys.executable)
    folder, log = OUT / environment, OUT / f"{environment}.log"
    if not (folder / ".installed").exists():
        why = _tail(log.read_text(), lines=1) if log.exists() else "make test-programs installs it"
        pytest.skip(f"programs of {environment} were not run, as it is not installed: {why}")
    return folder / "bin" / "python"


def versions(program: Program) -> dict[str, str]:
    names = ["torch", *program.packages]
    code = "import importlib.metadata as m, json, sys; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"
    command = [interpreter(program.environment), "-c", code, *names]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=LONG_S).stdout)


def _tail(text: str, lines: int = 80) -> str:
    return "\n".join(text.strip().splitlines()[-lines:])
