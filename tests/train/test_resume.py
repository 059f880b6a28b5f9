"""Stopping and going on: the losses are those of the run that was never stopped."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from odc_triton.checkpoint.steps import Checkpoints, verify
from odc_triton.train.metrics import MetricsFile, read_metrics
from odc_triton.train.sft_options import SftOptions
from tests.support import ranks, slow
from tests.support.sft_case import case, write_case

STEPS = 7
STOP = 3
# Saved and loaded bit by bit; on more than one rank gradients are added in the order of their arrival.
EXACT, ACROSS_RANKS = 0.0, 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # With dropout, so that the random numbers count.
    return write_case(tmp_path_factory.mktemp("resume"), config={"model_type": "gpt2", "resid_pdrop": 0.1})


def train(rank: int, world: int, wanted: SftOptions, stop_after: int | None) -> str:
    """Runs to the end, or until told to stop, on one rank only, after `stop_after` steps; returns how it ended."""
    from odc_triton.comm.launch import Interrupted
    from odc_triton.train.sft import train_sft

    def on_metrics(metrics: dict) -> None:
        if metrics["step"] == stop_after:
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        train_sft(wanted, on_metrics)
    except Interrupted as wish:
        return f"stopped by {wish.signal.name}"
    return "ended"


def losses(out: Path) -> list[float]:
    lines = read_metrics(out / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["loss"] for line in lines]


def uninterrupted(folder: Path, world: int, **changes: object) -> list[float]:
    """Of a run on `world` ranks; computed once per choice."""
    out = folder / f"whole-{world}-{'-'.join(map(str, changes))}"
    if not out.exists():
        wanted = case(folder, out=str(out), steps=STEPS, samples_per_rank=4 // world, **changes)
        assert ranks.run(train, world, wanted, None) == ["ended"] * world
    return losses(out)


def test_goes_on_with_other_replicas(folder: Path, tmp_path: Path) -> None:
    """Four ranks in two replicas, then two ranks in one, then two in two."""
    changes = {"init": str(folder / "without-dropout.json")}
    want = uninterrupted(folder, 1, **changes)
    out = tmp_path / "out"
    wanted = case(folder, out=str(out), steps=STEPS, resume="auto", **changes)
    for world, replicas, stop in ((4, 2, 1), (2, None, 4), (2, 2, None)):
        now = replace(wanted, samples_per_rank=4 // world, replicas=replicas)
        ended = set(ranks.run(train, world, now, stop))
        assert ended == {"ended" if stop is None else "stopped by SIGTERM"}
    torch.testing.assert_close(losses(out), want, rtol=ACROSS_RANKS, atol=0)
    # What the replicas wrote is the model that one process has trained.
    whole = next(folder.glob("whole-1-init")) / "model"
    for name, value in load_file(whole / "model.safetensors").items():
        torch.testing.assert_close(load_file(out / "model" / "model.safetensors")[name], value, rtol=0, atol=1e-5)


def test_replicas_that_the_ranks_cant_be_split_into(folder: Path, tmp_path: Path) -> None:
    wanted = case(folder, out=str(tmp_path / "out"), replicas=3)
    with ranks.start(train, 2, wanted, None) as job:
        for outcome in job.join():
            assert outcome.error_type == "ValueError", outcome.error
            assert "2 ranks can't be split into 3 equal replicas: give a divisor of 2" in outcome.error


@pytest.mark.parametrize(("world", "then"), [slow(1, 1), (2, 2), slow(2, 1), slow(1, 2)])
def test_goes_on_as_if_never_stopped(folder: Path, tmp_path: Path, world: int, then: int) -> None:
    # Another world deals dropout's random numbers otherwise: there without dropout.
    changes = {} if world == then else {"init": str(folder / "without-dropout.json")}
    want = uninterrupted(folder, world, **changes)
    out = tmp_path / "out"
    wanted = case(folder, out=str(out), steps=STEPS, samples_per_rank=4 // world, resume="auto", **changes)
    assert set(ranks.run(train, world, wanted, STOP)) == {"stopped by SIGTERM"}
    stopped = losses(out)
    # on_metrics is called after a step, so the ranks agree to stop in the next one.
    assert len(stopped) == STOP + 1
    assert [path.name for path in (out / "checkpoints").glob("step-*")] == [f"step-{STOP + 1:08d}"]
    assert ranks.run(train, then, replace(wanted, samples_per_rank=4 // then), None) == ["ended"] * then
    torch.testing.assert_close(losses(out), want, rtol=EXACT if world == then == 1 else ACROSS_RANKS, atol=0)
    assert (out / "model" / "model.safetensors").exists()


def _until_killed(rank: int, world: int, wanted: SftOptions) -> None:
    from odc_triton.train.sft import train_sft

    def on_metrics(metrics: dict) -> None:
        for thread in threading.enumerate():
            if thread.name == "checkpoint":
                thread.join()
        if metrics["step"] == STEPS:
            os.kill(os.getpid(), signal.SIGKILL)

    train_sft(wanted, on_metrics)


# With the save of step 4 only, the steps after it finish it; otherwise the save of step 6 waits for it.
@pytest.mark.parametrize(("world", "then", "every"), [slow(1, 1, 4), (2, 1, 2)])
def test_goes_on_from_a_checkpoint_written_in_the_background(
    folder: Path, tmp_path: Path, world: int, then: int, every: int
) -> None:
    """Rank 0 is killed after the last step: nothing was saved but in the background."""
    changes = {} if world == then else {"init": str(folder / "without-dropout.json")}
    want = uninterrupted(folder, world, **changes)
    out = tmp_path / "out"
    changes |= {"checkpoint_every": every, "checkpoint_background": True}
    wanted = case(folder, out=str(out), steps=STEPS, samples_per_rank=4 // world, resume="auto", **changes)
    with ranks.start(_until_killed, world, wanted) as job:
        outcomes = job.join()
    assert outcomes[0].signal == signal.SIGKILL
    assert [outcome.error_type for outcome in outcomes[1:]] == ["RankLost"] * (world - 1)
    whole = Checkpoints(out / "checkpoints", keep=9).all()
    assert "step-00000004" in [path.name for path in whole]
    for path in whole:
        verify(path)
    assert ranks.run(train, then, replace(wanted, samples_per_rank=4 // then), None) == ["ended"] * then
    torch.testing.assert_close(losses(out), want, rtol=EXACT if world == then else ACROSS_RANKS, atol=0)
    assert not [path.name for path in (out / "checkpoints").iterdir() if path.name.startswith(".step")]
    # It is done, with its last step saved: started again it leaves the report as it is, or writes one that is missing.
    report, names = (out / "report.html").read_bytes(), ("report.html", "trace.json", "timeline.png")
    if world > 1:  # as if it had been killed after that save
        for name in names:
            (out / name).unlink()
    assert ranks.run(train, then, replace(wanted, samples_per_rank=4 // then), None) == ["ended"] * then
    assert world > 1 or (out / "report.html").read_bytes() == report
    assert all((out / name).exists() for name in names)


@pytest.mark.parametrize(
    ("wanted", "device", "found"),
    [(None, "cpu", False), (None, "cuda", True), (True, "cpu", True), (False, "cuda", False)],
)
def test_what_saves_in_the_background(wanted: bool | None, device: str, found: bool) -> None:
    from odc_triton.train.loop import saves_in_background

    assert saves_in_background(wanted, torch.device(device)) is found


def test_dropout_is_in_the_losses(folder: Path) -> None:
    """Else the comparison above says nothing of the random numbers."""
    assert uninterrupted(folder, 1) != uninterrupted(folder, 1, init=str(folder / "without-dropout.json"))


def _train_twice(rank: int, world: int, wanted: SftOptions) -> tuple[str, list[float]]:
    """Goes on from an older checkpoint: metrics of the steps after it are written anew."""
    from odc_triton.train.sft import train_sft

    train_sft(replace(wanted, checkpoint_every=2, keep=10))
    first = losses(Path(wanted.out))
    for newer in ("step-00000006", "step-00000007"):
        shutil.rmtree(Path(wanted.out) / "checkpoints" / newer)
    train_sft(replace(wanted, resume="auto"))
    return first


def test_steps_that_are_taken_again_stand_once_in_the_metrics(folder: Path, tmp_path: Path) -> None:
    wanted = case(folder, out=str(tmp_path / "out"), steps=STEPS)
    (first,) = ranks.run(_train_twice, 1, wanted)
    assert losses(tmp_path / "out") == first
    assert len(first) == STEPS


def test_resume_from_a_folder_into_another(folder: Path, tmp_path: Path) -> None:
    wanted = case(folder, out=str(tmp_path / "a"), steps=STEPS, checkpoint_every=4)
    ranks.run(train, 1, wanted, None)
    other = replace(wanted, out=str(tmp_path / "b"), resume=str(tmp_path / "a" / "checkpoints" / "step-00000004"))
    assert ranks.run(train, 1, other, None) == ["ended"]
    lines = read_metrics(tmp_path / "b" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [5, 6, 7]
    assert [line["loss"] for line in lines] == losses(tmp_path / "a")[4:]


def _refused(rank: int, world: int, wanted: SftOptions) -> str:
    from odc_triton.train.sft import train_sft

    try:
        train_sft(wanted)
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_other_options_are_named(folder: Path, tmp_path: Path) -> None:
    wanted = case(folder, out=str(tmp_path / "out"), steps=2)
    ranks.run(train, 1, wanted, None)
    (text,) = ranks.run(_refused, 1, wanted)
    assert text.startswith("FileExistsError")
    assert "--resume auto" in text
    for text in ranks.run(_refused, 2, replace(wanted, resume="auto", lr=2e-3)):
        assert "--lr was 0.001 and is 0.002" in text
        assert "samples per step was 4 and is 8" in text
        assert "steps" not in text.replace("samples_per_step", "")


def test_metrics_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, step=0)
    for step in (1, 2, 3):
        file.write({"step": step, "loss": float("nan") if step == 2 else 0.5})
    file.close()
    with open(path, "ab") as torn:
        torn.write(b'{"step": 4, "lo')
    file = MetricsFile(path, step=2)
    file.write({"step": 3, "loss": 0.25})
    assert read_metrics(path) == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": None}, {"step": 3, "loss": 0.25}]
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]
    shutil.move(path, tmp_path / "elsewhere")
    with pytest.raises(OSError, match=r"can't be written \(No such file.*--resume auto"):
        file.write({"step": 4, "loss": 0.1})
    file.close()
