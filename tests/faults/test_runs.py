"""Runs with failing microbatches, failing ranks and stop requests."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import psutil
import pytest
import torch

from odc_triton import RankLost, full_parameters
from odc_triton.jobs.checkpoints.background import BackgroundCheckpoints
from odc_triton.jobs.checkpoints.steps import verify
from odc_triton.jobs.launcher import signals
from odc_triton.jobs.launcher.launch import Interrupted
from odc_triton.jobs.options.config_file import write_config
from odc_triton.jobs.train import outcome, sft
from odc_triton.jobs.train.job import lost_within
from odc_triton.jobs.train.metrics import read_metrics
from odc_triton.jobs.train.run_folder import RunFolder
from odc_triton.jobs.train.sft import train_sft
from odc_triton.jobs.train.sft_options import SftOptions
from odc_triton.jobs.train.sft_run import SftRun
from odc_triton.jobs.train.stop import StopSignal
from tests.checkpoint.test_background import writers_held_back
from tests.support import ranks
from tests.support.deadlines import LONG_S, until
from tests.support.leftovers import environment, interrupted
from tests.support.refusals import caught
from tests.support.sft_case import case, write_case


@dataclass(frozen=True, kw_only=True)
class Poisoned:
    """A run of five steps with a checkpoint of each, of which three are kept, and what must come of it."""

    poison: str = "nan"
    steps: tuple[int, ...] = (2,)  # whose minibatches go wrong, on rank 1
    told: int | None = None  # the rank that gets a stop request, in the last of these steps
    changes: dict[str, int] = field(default_factory=dict)
    saved: list[int]
    error: str = "ended"


POISONED = {
    "one": Poisoned(saved=[2, 4, 5]),  # the third is not saved
    "the last": Poisoned(steps=(3, 4), saved=[1, 2, 3, 5]),  # it was skipped: it replaces no older one
    "rank 0 told to stop": Poisoned(told=0, saved=[1, 2, 3], error="Interrupted"),
    "rank 1 told to stop": Poisoned(told=1, saved=[1, 2, 3], error="Interrupted"),
    "all": Poisoned(steps=(0, 1, 2, 3, 4), saved=[], error="TooManySkipped: no model is written: 5 of 5 steps"),
    "too many": Poisoned(
        changes={"max_skipped": 0},
        saved=[1, 2],
        error="TooManySkipped: step 3: the loss is nan .* more than --max-skipped 0",
    ),
    # What was still being written is completed, as all ranks know of the error.
    "out of memory": Poisoned(
        poison="out of memory",
        changes={"checkpoint_every": 2, "checkpoint_background": True},
        saved=[2],
        error="MinibatchFailed: minibatch 2 failed.*rank 1: OutOfMemoryError: no memory for 3 GiB",
    ),
}


@contextmanager
def written_when_waited_for() -> Iterator[None]:
    """The background's writer writes nothing before the run waits for it."""
    wait = BackgroundCheckpoints.wait

    with writers_held_back() as go_on:

        def waiting(background: BackgroundCheckpoints, **how: float) -> None:
            if not background.is_idle:
                go_on.set()
            wait(background, **how)

        with mock.patch.object(BackgroundCheckpoints, "wait", waiting):
            yield


def _poisoned(rank: int, world: int, folder: Path, name: str) -> tuple[str, list[dict], bool]:
    """The error, the metrics, and whether the third step changed weights."""
    given, seen, weights = POISONED[name], list[dict](), list[torch.Tensor]()

    def go_wrong(module: torch.nn.Module, inputs: tuple, output: torch.Tensor) -> torch.Tensor:
        if given.poison == "out of memory":
            raise torch.OutOfMemoryError("no memory for 3 GiB")
        return output * float("nan")

    class PoisonedRun(SftRun):
        def train_step(self) -> dict:
            weights.append(torch.cat([value.flatten() for _, value in full_parameters(self.model)]))
            handle = None
            if rank == 1 and self.state.step in given.steps:
                handle = self.model.model.layers[1].mlp.register_forward_hook(go_wrong)
            if rank == given.told and self.state.step == given.steps[-1]:
                os.kill(os.getpid(), signal.SIGTERM)
            try:
                seen.append(super().train_step())
            finally:
                if handle is not None:
                    handle.remove()
            return seen[-1]

    usual = {"steps": 5, "samples_per_rank": 2, "checkpoint_every": 1, "keep": 3, "max_skipped": 9}
    wanted = case(folder, out=str(folder / name), **usual | given.changes)
    quickly = mock.patch.object(outcome, "can_draw", return_value=False)
    with written_when_waited_for(), mock.patch.object(sft, "SftRun", PoisonedRun), quickly:
        try:
            sft.train_sft(wanted)
            error = "ended"
        except (RuntimeError, Interrupted) as raised:
            error = f"{type(raised).__name__}: {raised}"
    return error, seen, len(weights) > 3 and not torch.equal(weights[2], weights[3])


def test_steps_that_are_not_finite_and_a_microbatch_that_raises(tmp_path: Path) -> None:
    write_case(tmp_path)
    found = ranks.run_all(2, *((_poisoned, tmp_path, name) for name in POISONED))
    for name, of_ranks in zip(POISONED, found, strict=True):
        for error, seen, changed in of_ranks:
            assert re.match(POISONED[name].error, error, re.DOTALL), f"{name}: {error}"
            assert not changed or 2 not in POISONED[name].steps, name
            assert len(seen) == {"too many": 2, "out of memory": 2}.get(name, len(seen)), name
    for _, seen, _ in found[0]:
        assert math.isnan(seen[2]["loss"])
        assert all(math.isfinite(line["loss"]) for line in seen[:2] + seen[3:])
        assert [line["skipped"] for line in seen] == [0, 0, 1, 1, 1]
    for name, given in POISONED.items():
        kept = sorted((tmp_path / name / "checkpoints").glob("step-*"))
        assert [path.name for path in kept] == [f"step-{step:08d}" for step in given.saved], name
        assert (tmp_path / name / "model").exists() == (given.error == "ended"), name
        for path in kept:
            verify(path)
    assert read_metrics(tmp_path / "one" / "metrics.jsonl")[2]["loss"] is None
    assert "1 steps were skipped" in (tmp_path / "one" / "report.html").read_text()


def _losing_its_folder(rank: int, world: int, wanted: SftOptions) -> str:
    def on_metrics(metrics: dict) -> None:
        if metrics["step"] == 2:
            shutil.rmtree(wanted.out)

    return caught(lambda: train_sft(wanted, on_metrics))


def test_the_folder_vanishes(tmp_path: Path) -> None:
    wanted = case(write_case(tmp_path), steps=5, samples_per_rank=2)
    first, second = ranks.run(_losing_its_folder, 2, wanted)
    assert first.startswith("OSError: ")
    assert "metrics.jsonl can't be written (No such file or directory)" in first
    assert second.startswith("RankLost: ")
    assert "rank 0 gave up (OSError: " in second


def test_the_first_request_is_remembered_and_a_second_one_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)
    asked: list[str] = []
    stop = StopSignal(asked.append)
    with signals.handling(stop.on_signal, *signals.STOPS):
        stop.check_peers()
        assert (stop.signal, asked) == (None, [])
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.signal == signal.SIGTERM
        assert asked == ["its peers, after SIGTERM"]
        os.kill(os.getpid(), signal.SIGINT)  # at once: the launcher and the terminal both send it
        assert stop.signal == signal.SIGTERM
        monkeypatch.setattr(signals, "_SAME_REQUEST_S", 0.0)
        with pytest.raises(KeyboardInterrupt, match="a second time, by SIGINT"):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_lost_peer_is_named_though_torch_wraps_the_error() -> None:
    """The handler of SIGTERM raises in whatever runs, as DTensor's operators do in the optimizer's step."""
    lost, wrapped = RankLost([1], "rank 1 died"), RuntimeError("Sharding propagation failed for aten.sqrt.default")
    wrapped.__cause__ = lost
    assert lost_within(wrapped) is lost
    assert lost_within(lost) is lost
    assert lost_within(ValueError("another")) is None


def _command(wanted: SftOptions, *before: str) -> list[str]:
    path = f"{wanted.out}.yaml"
    write_config(path, wanted, comment="the run")
    return [sys.executable, *before, "--config", path]


@contextmanager
def _started(command: list[str]) -> Iterator[subprocess.Popen]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env=environment(), **pipes)
    try:
        yield process
    finally:
        process.kill()


def _wait_for_steps(process: subprocess.Popen, out: Path, steps: int) -> None:
    until(lambda: process.poll() is not None or len(read_metrics(out / "metrics.jsonl")) >= steps)
    assert process.poll() is None, process.communicate()


def test_the_command_is_told_to_stop(tmp_path: Path) -> None:
    """SIGTERM goes to the launcher only."""
    wanted = case(write_case(tmp_path), steps=100_000, samples_per_rank=2)
    command = _command(wanted, "-m", "odc_triton.tools.cli", "train", "sft", "--ranks", "2")
    with _started(command) as process:
        _wait_for_steps(process, tmp_path / "out", 3)
        process.terminate()
        text, problems = process.communicate(timeout=LONG_S)
    assert process.returncode == 128 + signal.SIGTERM, problems
    step = len(read_metrics(tmp_path / "out" / "metrics.jsonl"))
    path = tmp_path / "out" / "checkpoints" / f"step-{step:08d}"
    assert f"stopped after step {step} of 100000, saved in {path}; continue with --resume auto" in text
    assert path.is_dir()
    assert "Traceback" not in problems


def test_ctrl_c_in_the_first_second(tmp_path: Path) -> None:
    """Before any rank can save anything."""
    wanted = case(write_case(tmp_path), steps=100_000, samples_per_rank=2)
    command = _command(wanted, "-m", "odc_triton.tools.cli", "train", "sft", "--ranks", "2")

    def is_importing(process: subprocess.Popen) -> bool:
        return "libtorch" in Path(f"/proc/{process.pid}/maps").read_text()

    assert interrupted(command, is_importing) == (128 + signal.SIGINT, "odc-triton: stopped by SIGINT\n")


@pytest.mark.slow
def test_torchrun_brings_the_job_back(tmp_path: Path) -> None:
    wanted = case(write_case(tmp_path), steps=30, samples_per_rank=2, checkpoint_every=2, resume="auto")
    run = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1")
    command = _command(wanted, *run, "-m", "odc_triton.train.sft")
    with _started(command) as process:
        _wait_for_steps(process, tmp_path / "out", 5)
        children = psutil.Process(process.pid).children(recursive=True)
        (victim,) = [each for each in children if each.environ().get("RANK") == "1"]
        os.kill(victim.pid, signal.SIGKILL)
        text, problems = process.communicate(timeout=LONG_S)
    assert process.returncode == 0, problems
    assert "rank 0: rank 0 was waiting for" in problems
    assert "rank 1 died" in problems
    assert "continuing after step" in text
    lines = read_metrics(tmp_path / "out" / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 31))
    assert "Traceback" not in problems


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_the_command_joins_torchruns_world(tmp_path: Path, world: int) -> None:
    """Under torchrun each process of the command is a rank; a number of --ranks that is another one is refused."""
    wanted = case(write_case(tmp_path), steps=4, samples_per_rank=1)
    command = Path(sys.executable).with_name("odc-triton")
    run = ("-m", "torch.distributed.run", "--nproc-per-node", str(world), "--no-python", str(command), "train", "sft")
    for more, status, said in ((("--ranks", "3"), 1, f"--ranks is 3, and this process is one of {world}"), ((), 0, "")):
        done = subprocess.run([*_command(wanted, *run), *more], env=environment(), capture_output=True, text=True)
        assert done.returncode == status, done.stderr
        assert said in done.stderr
    assert f"on {world} ranks" in done.stdout
    assert done.stdout.count("model/ are in") == 1
    assert [line["step"] for line in read_metrics(tmp_path / "out" / "metrics.jsonl")] == [1, 2, 3, 4]


def test_another_job_in_the_same_folder(tmp_path: Path) -> None:
    identity = {"seed": 0}
    first, second = RunFolder(tmp_path / "out"), RunFolder(tmp_path / "out")
    first.lock(resume="never")
    assert first.take(identity) is False
    with pytest.raises(BlockingIOError, match="another job writes to"):
        second.lock(resume="auto")
    first.release()
    failed = RunFolder(tmp_path / "out")  # no step was taken: the folder is free, whatever the options
    failed.lock(resume="never")
    assert failed.take({"seed": 1, "longer": "x" * 99}) is False
    failed.release()
    again = RunFolder(tmp_path / "out")
    again.lock(resume="never")
    assert again.take(identity) is False
    again.release()
    (tmp_path / "out" / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(FileExistsError, match="holds a run already"):
        RunFolder(tmp_path / "out").lock(resume="never")
    (tmp_path / "out" / ".report.html.12.0123abcd").touch()
    (tmp_path / "out" / ".model.12.0123abcd.new").mkdir()
    third = RunFolder(tmp_path / "out")
    third.lock(resume="auto")
    assert not list((tmp_path / "out").glob(".*")), "what a killed job left half written"
    assert json.loads((tmp_path / "out" / "run.json").read_text()) == {"ended": None, "identity": identity}
    assert third.take(identity) is True
    third.release()
    (tmp_path / "out" / "model").touch()  # what the run would find at its end
    with pytest.raises(NotADirectoryError, match="out/model is in the way: it is not a folder"):
        third.lock(resume="auto")
