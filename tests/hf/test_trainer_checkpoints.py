"""Trainers' checkpoints are whole or not there, and a run goes on from the newest whole one."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import TrainerCallback

from odc_triton.base.errors import CheckpointCorrupt, CheckpointFailed
from odc_triton.jobs.trainers.trainer_checkpoints import find_checkpoint, why_not_whole
from tests.support import ranks, slow
from tests.support.trainer_case import logs, odc_trainer

SAVING = {"save_strategy": "steps", "save_steps": 1, "exact": True, "full_determinism": True, "max_steps": 3}


def _train(rank: int, world: int, folder: str, resume: bool | None = None, **changes: Any) -> list[float]:
    trainer = odc_trainer(folder, world, **SAVING | changes)
    trainer.train(resume_from_checkpoint=resume)
    return logs(trainer, "loss")


def _without(*names: str) -> Callable[[Path], None]:
    def remove(checkpoint: Path) -> None:
        for name in names:
            path = checkpoint / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    return remove


def _cut(checkpoint: Path) -> None:
    os.truncate(checkpoint / "trainer_state.json", 40)


def _changed(checkpoint: Path) -> None:
    (file,) = (checkpoint / "odc").glob("__0_0*")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def _other_trainers(checkpoint: Path) -> None:
    (checkpoint / "optimizer.pt").touch()
    _without("odc")(checkpoint)


def _users_copy(checkpoint: Path) -> None:
    shutil.copytree(checkpoint.with_name("checkpoint-1"), checkpoint.with_name("checkpoint-best-9"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    ranks.run(_train, 1, str(folder))
    return folder


# What happened to checkpoint-3; from which one True goes on, or what the refusal says; and what is said of it.
TABLE = [
    (lambda checkpoint: None, "checkpoint-3", ""),
    (_without("odc", "scheduler.pt", "rng_state.pth", "trainer_state.json"), "checkpoint-2", "has no complete odc/"),
    (_without("odc/manifest.json"), "checkpoint-2", "manifest.json is missing"),
    (_without("odc/random-0.json"), "checkpoint-2", "random-0.json is missing"),
    (_without("scheduler.pt"), "checkpoint-2", "has no scheduler.pt"),
    (_without("rng_state.pth"), "checkpoint-3", ""),
    (_users_copy, "checkpoint-3", ""),
    (_without("odc"), "checkpoint-2", "has no complete odc/"),  # its removal was interrupted
    (_without("odc", "scheduler.pt", "rng_state.pth"), None, "the newest whole one is"),  # save_only_model
    (_cut, "checkpoint-2", "trainer_state.json is not valid JSON"),
    (_changed, "checkpoint-2", "was changed after it was written"),
    (_other_trainers, None, "the newest whole one is"),
]


@pytest.mark.parametrize(("damage", "wanted", "words"), TABLE)
def test_the_newest_whole_one(
    tmp_path: Path, saved: Path, capsys: pytest.CaptureFixture[str], damage: Callable, wanted: str | None, words: str
) -> None:
    out = shutil.copytree(saved, tmp_path / "out")
    damage(out / "checkpoint-3")
    if wanted is None:
        with pytest.raises(CheckpointCorrupt, match=f"{words} {out / 'checkpoint-2'}"):
            find_checkpoint(True, out)
    else:
        assert find_checkpoint(True, out) == str(out / wanted)
        assert words in capsys.readouterr().out
    named = out / "checkpoint-3"
    if why_not_whole(named) is None:  # or only a digest differs, which loading finds
        assert find_checkpoint(str(named), out) == str(named)
    else:
        with pytest.raises(CheckpointCorrupt, match=f"the newest whole one is {out / 'checkpoint-2'}"):
            find_checkpoint(str(named), out)


def test_none_is_whole(tmp_path: Path, saved: Path) -> None:
    assert find_checkpoint(True, tmp_path / "missing") is True  # Trainer says it
    for folder in saved.glob("checkpoint-*"):
        _cut(shutil.copytree(folder, tmp_path / folder.name))
    with pytest.raises(CheckpointCorrupt, match=r"checkpoint-3, as .* there is no whole one next to it"):
        find_checkpoint(True, tmp_path)
    with pytest.raises(CheckpointCorrupt, match=r"from .*/checkpoint-7, as there is no such folder; "):
        find_checkpoint(saved / "checkpoint-7", tmp_path)


_FILE_EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")


def _killed(rank: int, world: int, folder: str, victim: int, moment: int) -> None:
    """A kill at the moment-th file event while checkpoint-2 is saved; the last are of the removal of checkpoint-1."""
    trainer = odc_trainer(folder, world, save_total_limit=1, **SAVING)
    save, left = trainer._save_checkpoint, [moment]

    def dies(event: str, _: Any) -> None:
        if event in _FILE_EVENTS and trainer.state.global_step == 2 and saving:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    saving: list[int] = []

    def saves(*args: Any) -> None:
        saving.append(1)
        save(*args)
        saving.clear()

    trainer._save_checkpoint = saves
    if rank == victim:
        sys.addaudithook(dies)
    trainer.train()


_MOMENTS = [(0, 60), *(slow(0, moment) for moment in range(0, 96, 8)), slow(1, 0), slow(1, 4)]


@pytest.mark.parametrize(("victim", "moment"), _MOMENTS)
def test_killed_while_saving(tmp_path: Path, victim: int, moment: int) -> None:
    """What is called checkpoint-2 is whole at any moment, and so is checkpoint-1 until then; a run goes on from it."""
    out = tmp_path / "out"
    with ranks.start(_killed, 2, str(out), victim, moment) as job:
        outcomes = job.join()
    assert outcomes[victim].signal == signal.SIGKILL, outcomes[victim].error
    found = Path(find_checkpoint(True, out))
    assert why_not_whole(found) is None
    assert found.name == ("checkpoint-2" if (out / "checkpoint-2").exists() else "checkpoint-1")
    if (victim, moment) != _MOMENTS[0]:
        assert ranks.run(_train, 2, str(out), True) == ranks.run(_train, 2, str(tmp_path / "whole"))
        assert [*out.glob(".*")] == []


def _ends(rank: int, world: int, folder: str, kind: str) -> None:
    """The callbacks of both ranks raise, one after the other, or rank 0's disk is full, or times are equal."""

    class Raises(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            time.sleep(0.8 * rank)
            if kind == "runtime":
                raise torch.OutOfMemoryError("mine")
            try:
                raise CheckpointFailed([0], "an older one")
            except CheckpointFailed:
                raise KeyError("mine")  # noqa: B904

    if kind == "rotation" and rank == 0:
        (Path(folder) / "checkpoint-9").mkdir(parents=True)
        os.path.getmtime = lambda path: 0.0
    callbacks = [Raises()] if kind in ("runtime", "context") else []
    trainer = odc_trainer(folder, world, callbacks=callbacks, save_total_limit=1, **SAVING)
    if kind == "full" and rank == 0:
        trainer._save_scaler = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    trainer.train()


@pytest.mark.parametrize(
    ("kind", "error", "words", "left"),
    [
        slow("runtime", "OutOfMemoryError", "mine", []),
        slow("context", "KeyError", "mine", []),
        slow("full", "CheckpointFailed", "could not save checkpoint-1 (rank 0: No space left on device)", []),
        slow("rotation", None, "", ["checkpoint-3"]),
    ],
)
def test_how_it_ends(tmp_path: Path, kind: str, error: str | None, words: str, left: list[str]) -> None:
    with ranks.start(_ends, 2, str(tmp_path / "out"), kind) as job:
        outcomes = job.join()
    for each in outcomes:
        assert (each.error_type, words in (each.error or "")) == (error, True), each.error
    assert sorted(path.name for path in tmp_path.glob("out/*") if kind != "context") == left
