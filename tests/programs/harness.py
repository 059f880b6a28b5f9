"""Runs an unmodified program twice on two CPU ranks, without ours and with it, and compares what both have trained.

    LOOP = Program(name="a loop", words=[script("loop.py"), "{out}"], environment="lightning", packages=["lightning"])

    def test_loop(tmp_path: Path) -> None:
        run_both(LOOP, tmp_path).assert_trained(steps=6, within=1e-8)

An environment other than the project's is environments/NAME.sh, which `make test-programs` runs once.
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

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


def accelerate(config: str) -> tuple[str, ...]:
    """accelerate's launcher, with a file of scripts/."""
    return ("-m", "accelerate.commands.launch", "--config_file", script(config), "--main_process_port", "{port}")


@dataclass(frozen=True, kw_only=True)
class Program:
    """`words`: a script and its arguments, or -m, a module and its. In them {out} is the folder of the run, where the
    program saves its weights: *.safetensors or one *.pt, in it or below it.

    A program that has a line of ours itself, instead of -m odc_triton.run before it, says so by `words_with_odc`.
    """

    name: str
    words: Sequence[str]
    words_with_odc: Sequence[str] | None = None
    launcher: Sequence[str] = TORCHRUN
    environment: str = PROJECT
    packages: Sequence[str] = ()  # whose versions are recorded, besides torch's
    variables: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = LONG_S


@dataclass(frozen=True, kw_only=True)
class Run:
    """`seconds` with the start; minibatches and waits are those that rank 0 names at its end, None if it does not."""

    folder: Path
    seconds: float
    output: str
    minibatches: int | None
    waits: int | None

    def weights(self) -> dict[str, torch.Tensor]:
        files = [file for suffix in ("safetensors", "pt") for file in sorted(self.folder.rglob(f"*.{suffix}"))]
        assert files, f"no weights in {self.folder}: {_tail(self.output)}"
        if files[0].suffix == ".pt":
            return torch.load(files[0], weights_only=True, map_location="cpu")
        return {name: value for file in files if file.suffix != ".pt" for name, value in load_file(file).items()}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """`difference`: the largest of all weights, between the run without ours and the run with it."""

    program: str
    versions: dict[str, str]
    difference: float
    seconds_plain: float
    seconds_odc: float
    minibatches: int | None
    waits: int | None

    def assert_trained(self, *, steps: int, within: float) -> None:
        """One minibatch an optimizer step, two waits each, and the weights of the run without ours."""
        assert (self.minibatches, self.waits) == (steps, 2 * steps)
        assert self.difference <= within


def run_both(program: Program, folder: Path) -> Outcome:
    """Also appended to results.json."""
    plain, odc = run(program, folder / "plain"), run(program, folder / "odc", with_odc=True)
    outcome = Outcome(
        program=program.name,
        versions=versions(program),
        difference=largest_difference(plain.weights(), odc.weights()),
        seconds_plain=plain.seconds,
        seconds_odc=odc.seconds,
        minibatches=odc.minibatches,
        waits=odc.waits,
    )
    before = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps([*before, {"at": time.time()} | asdict(outcome)], indent=1) + "\n")
    return outcome


def run(program: Program, folder: Path, *, with_odc: bool = False) -> Run:
    """Runs it once, in `folder`, which is made. Raises if it fails; none of its processes stays."""
    folder.mkdir(parents=True, exist_ok=True)
    words = [*(WITH_ODC if with_odc else ()), *program.words]
    if with_odc and program.words_with_odc is not None:
        words = [*program.words_with_odc]
    names = {"out": str(folder), "port": str(_free_port())}
    command = [str(interpreter(program.environment)), *(_filled(word, names) for word in (*program.launcher, *words))]
    mark, log = uuid.uuid4().hex, folder / "output.log"
    start_s = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=finds_the_package() | _OFFLINE | program.variables | {_MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(program.timeout_s)
        except subprocess.TimeoutExpired:
            status = f"nothing after {program.timeout_s:g} s"
        finally:
            _kill(mark)
            process.wait()
    seconds, said = time.monotonic() - start_s, log.read_text(errors="replace")
    assert status == 0, f"{' '.join(command)}: {status}\n{_tail(said)}"
    last = "".join(re.findall(r"odc-triton run:.*", said)[-1:])
    minibatches, waits = (re.search(rf"(\d+) {word}", last) for word in ("minibatch", "wait"))
    return Run(
        folder=folder,
        seconds=seconds,
        output=said,
        minibatches=int(minibatches[1]) if minibatches else None,
        waits=int(waits[1]) if waits else None,
    )


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


def _filled(word: str, names: Mapping[str, str]) -> str:
    """Words may be JSON, so only our names are replaced."""
    return re.sub(r"\{(out|port)\}", lambda found: names[found[1]], word)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _kill(mark: str) -> None:
    """All processes of a run: launchers put ranks into sessions of their own."""
    for process in psutil.process_iter(["environ"]):
        if (process.info["environ"] or {}).get(_MARK) == mark:
            process.kill()


def _tail(text: str, lines: int = 80) -> str:
    return "\n".join(text.strip().splitlines()[-lines:])
