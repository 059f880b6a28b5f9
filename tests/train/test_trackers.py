"""Trackers with their real packages, offline, and ones that fail, hang or outlive their rank."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from odc_triton.cli.command import main
from odc_triton.train import trackers
from odc_triton.train.metrics import Metrics, read_metrics
from odc_triton.train.sft_options import SftOptions
from odc_triton.train.trackers import Trackers
from tests.support import logged, ranks, slow
from tests.support.leftovers import environment
from tests.support.sft_case import case, write_case

ALL = ("tensorboard", "wandb", "trackio")
STEPS, STOP, SAVED = 6, 4, 2
OF_TIME = ("seconds", "idle", "target_tokens_per_s")


def train(rank: int, world: int, wanted: SftOptions, stop: bool, variables: dict[str, str]) -> str:
    """`stop`: rank 0 is told to after step 3, so that the run ends after step 4."""
    from odc_triton.comm.launch import Interrupted
    from odc_triton.train.sft import train_sft

    os.environ.update(variables)
    trackers.Trackers.close.__kwdefaults__["within_s"] = 60.0  # on a busy machine wandb takes over 5 s to start

    def on_metrics(metrics: Metrics) -> None:
        if stop and metrics["step"] == STOP - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        train_sft(wanted, on_metrics)
    except Interrupted:
        return "stopped"
    return "ended"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_case(tmp_path_factory.mktemp("trackers"))
    held_out = (folder / "data.jsonl").read_text().splitlines()[:3]
    (folder / "held_out.jsonl").write_text("".join(line + "\n" for line in held_out))
    return folder


@pytest.fixture(scope="module")
def out(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with all trackers, stopped after step 4, and gone on with from step 2: steps 3 and 4 are taken again."""
    out = tmp_path_factory.mktemp("logged") / "my run"
    variables = {"WANDB_MODE": "offline", "TRACKIO_DIR": str(out.parent / "trackio")}
    wanted = case(
        folder,
        out=str(out),
        steps=STEPS,
        checkpoint_every=SAVED,
        resume="auto",
        eval_data=str(folder / "held_out.jsonl"),
        eval_every=2,
        eval_samples=2,
        eval_sample_tokens=6,
        report_to=ALL,
    )
    wanted = replace(wanted, samples_per_rank=2)
    assert ranks.run(train, 2, wanted, True, variables) == ["stopped"] * 2
    shutil.rmtree(out / "checkpoints" / f"step-{STOP:08d}")
    assert ranks.run(train, 2, wanted, False, variables) == ["ended"] * 2
    return out


def same(kept: logged.Kept, lines: list[Metrics], *, but: tuple[str, ...] = (), exact: bool = True) -> None:
    """Each metric of each step is there once. `but`: those that are not compared."""
    for name in {name for line in lines for name in line} - {"step", *but}:
        want = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
        found = kept[name]
        assert [step for step, _ in found] == [step for step, _ in want], name
        values, others = [value for _, value in found], [value for _, value in want]
        # Steps taken again differ by the order in which two ranks' gradients were added.
        assert values == (others if exact else pytest.approx(others, rel=1e-5)), name


def test_a_run_that_goes_on_is_one_chart(out: Path) -> None:
    """One test, as each of xdist's processes that has one of several would make the run."""
    lines = read_metrics(out / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert [line["step"] for line in read_metrics(out / "samples.jsonl")] == [2, 2, 4, 4, 6, 6]
    _in_tensorboard(out, lines)
    _in_wandb(out, lines)
    _in_trackio(out, lines)


def _in_tensorboard(out: Path, lines: list[Metrics]) -> None:
    scalars, texts = logged.in_tensorboard(out / "tensorboard")
    same(scalars, [{k: v if k == "step" else float(np.float32(v)) for k, v in line.items()} for line in lines])
    assert "samples_per_rank" in texts["options"][0]
    assert texts["samples"][-1].count("\n") == 3  # heading, rule and two samples
    assert f"{STEPS} steps over" in texts["final"][-1]


def _in_wandb(out: Path, lines: list[Metrics]) -> None:
    (first_id, first, _), (second_id, second, summary) = logged.in_wandb(out / "wandb")
    assert first_id == second_id == (out / "wandb" / "run-id").read_text()
    same(second, lines)  # the newest folder has the whole run
    assert [step for step, _ in first["loss"]] == list(range(1, STOP + 1))
    same({name: [each for each in kept if each[0] <= SAVED] for name, kept in first.items()}, lines[:SAVED])
    assert [step for step, _ in second["samples/nrows"]] == [4, 6]
    assert summary["words"].startswith(f"{STEPS} steps over")


def _in_trackio(out: Path, lines: list[Metrics]) -> None:
    code = "import json; from tests.support import logged; print(json.dumps(logged.in_trackio('odc-triton')))"
    variables = environment() | {"TRACKIO_DIR": str(out.parent / "trackio")}  # read when trackio is imported
    told = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=60)
    runs, kept = json.loads(told.stdout)
    ((name, config),) = runs
    assert (name, config["samples_per_rank"], config["ranks"]) == ("my run", 2, 2)
    same(kept, lines, but=OF_TIME, exact=False)
    assert [step for step, _ in kept["samples"]] == [2, 4, 6]
    assert f"{STEPS} steps over" in kept["final"][0][1]["_value"]


# ------------------------------------------------------------------ trackers that fail

RAISES = """
class Table: pass
def init(**_):
    return Run()
class Run:
    id, offline = "x", False
    def log(self, *_, **__):
        raise OSError(28, "No space left on device")
"""
HANGS = "import time\ndef init(**_):\n    time.sleep(600)\n"
DIES = "import os\ndef init(**_):\n    os.kill(os.getpid(), 9)\n"


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Starts trackers whose wandb is another module, in a folder of its own."""
    (tmp_path / "fake").mkdir()
    (tmp_path / "out").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path / "fake"))
    options = SftOptions(data="d", init="i", tokenizer="t", out=str(tmp_path / "out"), report_to=("wandb",))

    def start(code: str) -> Trackers:
        (tmp_path / "fake" / "wandb.py").write_text(code)
        return Trackers(options, ranks=1)

    return start


def steps_until_off(started: Trackers, tracker: Any, most_s: float = 120.0) -> int:
    deadline, step = time.monotonic() + most_s, 0
    while not tracker._problem:
        assert time.monotonic() < deadline
        step += 1
        start_s = time.monotonic()
        started.log({"step": step, "loss": 1.0})
        assert time.monotonic() - start_s < 20, "the step waited"  # microseconds, unless the machine is busy
        time.sleep(0.01)
    return step


@pytest.mark.parametrize(
    ("code", "said"),
    [(RAISES, "OSError: [Errno 28] No space left on device"), (DIES, "its process was killed by SIGKILL")],
    ids=["raises", "dies"],
)
def test_one_that_fails_is_told_once(fake: Any, capsys: pytest.CaptureFixture, code: str, said: str) -> None:
    started = fake(code)
    (tracker,) = started._running
    off = steps_until_off(started, tracker)
    started.log({"step": off + 1, "loss": 1.0})
    started.finish({"step": off + 2, "loss": 1.0}, "words")
    started.close()
    told = capsys.readouterr()
    # The kernel's name of what killed it may be followed by a hint.
    assert told.err.startswith(f"odc-triton: wandb is off since step {off}, and the run goes on without it: {said}")
    assert told.out.startswith(f"wandb was off since step {off}; metrics.jsonl has all steps: {said}")
    assert (told.err.count("\n"), told.out.count("\n")) == (1, 1)


def test_one_that_hangs_is_killed_at_the_end(fake: Any, capsys: pytest.CaptureFixture) -> None:
    started = fake(HANGS)
    (tracker,) = started._running
    for step in range(1, 20_001):  # more than the socket holds
        started.log({"step": step, "loss": 1.0})
    assert not tracker._problem
    assert tracker._unsent
    start_s = time.monotonic()
    started.finish({"step": 20_001, "loss": 1.0}, "words")
    started.close(within_s=0.5)
    assert time.monotonic() - start_s < 30
    assert not psutil.pid_exists(tracker._process.pid)
    assert "wandb had not taken all steps 0.5 s after the end and is killed" in capsys.readouterr().err


def test_what_is_kept_for_one_that_hangs_is_bounded(
    fake: Any, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "_MOST_BYTES", 2**20)
    started = fake(HANGS)
    (tracker,) = started._running
    for step in range(1, 40_001):
        started.log({"step": step, "loss": 1.0})
    assert "wandb is off" in capsys.readouterr().err
    assert len(tracker._unsent) < 2**20 + 1000
    assert not psutil.pid_exists(tracker._process.pid)
    started.close()


def _trains(rank: int, world: int, wanted: SftOptions, fake: str) -> str:
    sys.path.insert(0, fake)
    return train(rank, world, wanted, False, {})


def test_a_run_whose_tracker_fails_ends_well(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "wandb.py").write_text(RAISES)
    wanted = case(folder, out=str(tmp_path / "out"), steps=2, report_to=("wandb",))
    assert ranks.run(_trains, 1, wanted, str(tmp_path)) == ["ended"]
    assert (tmp_path / "out" / "model" / "model.safetensors").exists()


def _sleeps(rank: int, world: int, wanted: SftOptions, variables: dict[str, str], fake: str | None) -> None:
    os.environ.update(variables)
    if fake is not None:
        sys.path.insert(0, fake)
    started = Trackers(wanted, ranks=1)
    started.log({"step": 1, "loss": 1.0})
    time.sleep(600)


def _with(mark: str) -> list[str]:
    """The command lines of the processes that have OF_THE_TEST in their environment."""
    found = []
    for each in psutil.process_iter():
        try:
            if each.environ().get("OF_THE_TEST") == mark:
                found.append(" ".join(each.cmdline()))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            pass
    return found


def _none_is_left(mark: str) -> None:
    deadline = time.monotonic() + 60  # wandb-core looks for its parent every few seconds
    while left := _with(mark):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("names", "code", "program"),
    [(("wandb",), HANGS, "tracker_process"), slow(ALL, None, "wandb-core")],
    ids=["one that hangs", "the packages"],
)
def test_nothing_outlives_a_killed_rank(
    folder: Path, tmp_path: Path, names: tuple[str, ...], code: str | None, program: str
) -> None:
    mark = str(tmp_path)
    if code is not None:
        (tmp_path / "wandb.py").write_text(code)
    wanted = case(folder, out=str(tmp_path / "out"), report_to=names)
    variables = {"WANDB_MODE": "offline", "TRACKIO_DIR": str(tmp_path), "OF_THE_TEST": mark}
    with ranks.start(_sleeps, 1, wanted, variables, code and str(tmp_path)) as job:
        deadline = time.monotonic() + 120
        while not any(program in line for line in _with(mark)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(job.processes[0].pid, signal.SIGKILL)
        job.join()
    _none_is_left(mark)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_leaves_nothing(folder: Path, tmp_path: Path, number: int) -> None:
    """SIGTERM goes to the launcher only, Ctrl-C to all of the terminal's processes."""
    out, mark = tmp_path / "out", str(tmp_path)
    given = {"data": "data.jsonl", "init": "config.json", "tokenizer": "tokenizer.json"}
    command = [sys.executable, "-m", "odc_triton.cli", "train", "sft", "--ranks", "2", "--out", str(out), "--truncate"]
    command += [word for name, value in given.items() for word in (f"--{name}", str(folder / value))]
    command += [
        "--token-cap",
        "256",
        "--samples-per-rank",
        "2",
        "--steps",
        "100000",
        *(f"--report-to={n}" for n in ALL),
    ]
    variables = environment() | {"WANDB_MODE": "offline", "TRACKIO_DIR": str(tmp_path), "OF_THE_TEST": mark}
    with subprocess.Popen(command, env=variables, stderr=subprocess.PIPE, start_new_session=True) as process:
        deadline = time.monotonic() + 100
        while len(read_metrics(out / "metrics.jsonl")) < 3 or not any("wandb-core" in each for each in _with(mark)):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        if number == signal.SIGINT:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        problems = process.communicate(timeout=60)[1].decode()
    assert process.returncode == 128 + number, problems
    _none_is_left(mark)
    ((_, kept, _),) = logged.in_wandb(out / "wandb")
    same(kept, read_metrics(out / "metrics.jsonl"))


# ------------------------------------------------------------------ the options


def test_one_that_is_not_installed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from odc_triton.train.sft import check_before_start

    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(
        ImportError, match=r'--report-to trackio needs trackio; run: pip install "odc-triton\[trackio\]"'
    ):
        check_before_start(case(folder, report_to=("trackio",)), 1)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("mlflow",), "--report-to is 'mlflow'; give one of tensorboard, wandb, trackio"),
        (("wandb", "wandb"), "--report-to has wandb 2 times; give it once"),
    ],
)
def test_refused_names(folder: Path, names: tuple[str, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        case(folder, report_to=names)


def test_the_command_refuses_an_unknown_tracker(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["train", "sft", "--data", "d", "--out", "o", "--report-to", "mlflow"])
    assert "invalid choice: 'mlflow' (choose from 'tensorboard', 'wandb', 'trackio')" in capsys.readouterr().err
