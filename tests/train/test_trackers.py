"""Trackers with their real packages, offline, and ones that fail, hang or outlive their rank."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import psutil
import pytest

from odc_triton.base.config_file import write_config
from odc_triton.train import trackers
from odc_triton.train.metrics import Metrics, read_metrics
from odc_triton.train.sft_options import SftOptions
from odc_triton.train.trackers import Trackers
from tests.support import logged, ranks
from tests.support.deadlines import LONG_S
from tests.support.leftovers import environment
from tests.support.sft_case import case, write_case

ALL = ("tensorboard", "wandb", "trackio")
STEPS, STOP, SAVED = 6, 4, 2
OF_TIME = ("seconds", "idle", "target_tokens_per_s")


def train(rank: int, world: int, wanted: SftOptions, stop: bool, variables: dict[str, str]) -> str:
    """`stop`: rank 0 is told to after step 3, so that the run ends after step 4."""
    from odc_triton.comm.launch import Interrupted
    from odc_triton.train import loop
    from odc_triton.train.sft import train_sft

    os.environ.update(variables)
    for name in [name for name in sys.modules if name.partition(".")[0] == "trackio"]:
        del sys.modules[name]  # the fork server has imported it, with its own environment
    # On a busy machine wandb takes seconds to start.
    trackers.Trackers.close.__kwdefaults__["within_s"] = loop.END_S = LONG_S

    def on_metrics(metrics: Metrics) -> None:
        if stop and metrics["step"] == STOP - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        with mock.patch("odc_triton.train.outcome.can_draw", return_value=False):
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


def run(folder: Path, out: Path, names: tuple[str, ...]) -> list[Metrics]:
    """Stopped after step 4, and resumed from step 2: steps 3 and 4 are taken again. Returns each step's metrics."""
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
        report_to=names,
    )
    wanted = replace(wanted, samples_per_rank=2)
    assert ranks.run(train, 2, wanted, True, variables) == ["stopped"] * 2
    shutil.rmtree(out / "checkpoints" / f"step-{STOP:08d}")
    assert ranks.run(train, 2, wanted, False, variables) == ["ended"] * 2
    lines = read_metrics(out / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert [line["step"] for line in read_metrics(out / "samples.jsonl")] == [2, 2, 4, 4, 6, 6]
    return lines


def same(kept: logged.Kept, lines: list[Metrics], *, but: tuple[str, ...] = (), exact: bool = True) -> None:
    """Each metric of each step is there once. `but`: those that are not compared."""
    for name in {name for line in lines for name in line} - {"step", *but}:
        want = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
        found = kept[name]
        assert [step for step, _ in found] == [step for step, _ in want], name
        values, others = [value for _, value in found], [value for _, value in want]
        # Steps taken again differ by the order in which two ranks' gradients were added.
        assert values == (others if exact else pytest.approx(others, rel=1e-5)), name


def test_a_resumed_run_is_one_chart(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "my run"
    _in_tensorboard(out, run(folder, out, ("tensorboard",)))


@pytest.mark.slow
def test_a_resumed_run_is_one_chart_in_each(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "my run"
    lines = run(folder, out, ALL)
    _in_tensorboard(out, lines)
    _in_wandb(out, lines)
    _in_trackio(out, lines)


def _in_tensorboard(out: Path, lines: list[Metrics]) -> None:
    scalars, texts = logged.in_tensorboard(out / "tensorboard")
    same(scalars, [{k: v if k == "step" else float(np.float32(v)) for k, v in line.items()} for line in lines])
    assert "samples_per_rank" in texts["options/text_summary"][0]
    assert texts["samples/text_summary"][-1].count("\n") == 3  # heading, rule and two samples
    assert f"{STEPS} steps over" in texts["final/text_summary"][-1]


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
    assert told.returncode == 0, told.stderr
    runs, kept = json.loads(told.stdout)
    ((name, config),) = runs
    assert (name, config["samples_per_rank"], config["ranks"]) == ("my run", 2, 2)
    same(kept, lines, but=OF_TIME, exact=False)
    assert [step for step, _ in kept["samples"]] == [2, 4, 6]
    assert f"{STEPS} steps over" in kept["final"][0][1]["_value"]


# ------------------------------------------------------------------ trackers that fail


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Starts trackers whose wandb is another module."""
    options = SftOptions(data="d", init="i", tokenizer="t", out=str(tmp_path), report_to=("wandb",))

    def start(init: Any) -> Trackers:
        monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Table=None))
        return Trackers(options, ranks=1)

    return start


def test_one_that_raises_is_reported_once(fake: Any, capsys: pytest.CaptureFixture) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    started = fake(lambda **_: SimpleNamespace(id="x", offline=False, log=fail))
    (tracker,) = started._running
    started.log({"step": 7, "loss": 1.0})
    tracker._thread.join(LONG_S)
    started.log({"step": 8, "loss": 1.0})
    started.finish({"step": 9, "loss": 1.0}, "words")
    started.close()
    said = "[Errno 28] No space left on device\n"
    assert capsys.readouterr() == (
        f"wandb was off since step 7; metrics.jsonl has all steps: {said}",
        f"odc-triton: wandb is off since step 7, and the run goes on without it: {said}",
    )


def test_one_that_hangs_keeps_a_bounded_queue(fake: Any, capsys: pytest.CaptureFixture) -> None:
    answers = threading.Event()
    started = fake(lambda **_: answers.wait(LONG_S))
    (tracker,) = started._running
    for step in range(1, 10_001):
        started.log({"step": step, "loss": 1.0})
    assert not tracker.problem
    started.log({"step": 10_001, "loss": 1.0})
    assert tracker._calls.qsize() == 10_000
    started.close(within_s=LONG_S)  # it is not waited for
    answers.set()
    tracker._thread.join(LONG_S)
    assert "it is slower than the run, and 10000 calls wait for it" in capsys.readouterr().err


def test_one_that_hangs_is_left_at_the_end(fake: Any, capsys: pytest.CaptureFixture) -> None:
    answers = threading.Event()
    started = fake(lambda **_: answers.wait(LONG_S))
    started.finish({"step": 1, "loss": 1.0}, "words")
    (tracker,) = started._running
    started.close(within_s=0.1)
    answers.set()
    tracker._thread.join(LONG_S)
    said = "odc-triton: wandb had not logged all steps 0.1 s after the end; metrics.jsonl has them\n"
    assert capsys.readouterr().err.startswith(said)


def _sleeps(rank: int, world: int, wanted: SftOptions, variables: dict[str, str]) -> None:
    os.environ.update(variables)
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


@pytest.mark.slow
def test_nothing_outlives_a_killed_rank(folder: Path, tmp_path: Path) -> None:
    mark = str(tmp_path)
    wanted = case(folder, out=str(tmp_path / "out"), report_to=ALL)
    variables = {"WANDB_MODE": "offline", "TRACKIO_DIR": str(tmp_path), "OF_THE_TEST": mark}
    with ranks.start(_sleeps, 1, wanted, variables) as job:
        deadline = time.monotonic() + 120
        while not any("wandb-core" in line for line in _with(mark)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(job.processes[0].pid, signal.SIGKILL)
        job.join()
    _none_is_left(mark)


@pytest.mark.slow
def test_a_server_that_never_answers(folder: Path, tmp_path: Path) -> None:
    """It accepts, and the run ends: not when wandb gives up, after 90 s, but not later than 10 s after its work."""
    wanted = case(folder, out=str(tmp_path / "out"), steps=2, report_to=("wandb",))
    with socket.create_server(("127.0.0.1", 0)) as server:
        variables = environment() | {"OF_THE_TEST": str(tmp_path), "WANDB_API_KEY": "0" * 40, "WANDB_MODE": "online"}
        variables["WANDB_BASE_URL"] = f"http://127.0.0.1:{server.getsockname()[1]}"
        write_config(tmp_path / "run.yaml", wanted, comment="the run")
        command = [sys.executable, "-m", "odc_triton.cli", "train", "sft", "--config", str(tmp_path / "run.yaml")]
        ended = subprocess.run(command, env=variables, stderr=subprocess.PIPE, text=True, timeout=LONG_S)
    assert ended.returncode == 0, ended.stderr
    assert "wandb had not logged all steps 6 s after the end" in ended.stderr
    _none_is_left(str(tmp_path))


def test_one_that_is_not_installed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from odc_triton.train.sft import check_before_start

    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(
        ImportError, match=r'--report-to trackio needs trackio; run: pip install "odc-triton\[trackio\]"'
    ):
        check_before_start(case(folder, report_to=("trackio",)), 1)
