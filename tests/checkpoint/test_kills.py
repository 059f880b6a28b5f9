"""A rank killed while it saves or loads a checkpoint."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from odc_triton.base.errors import RankLost
from odc_triton.checkpoint.background import BackgroundCheckpoints
from odc_triton.checkpoint.steps import Checkpoints, verify
from tests.checkpoint.test_faults import MODEL, saved_twice
from tests.support import ranks, slow
from tests.support.checkpointed import make, settle, train, unfinished
from tests.support.deadlines import LONG_S


def _until_killed(rank: int, world: int, folder: Path, way: str) -> None:
    model, optimizer = make(MODEL, bf16=False)
    checkpoints = Checkpoints(folder, keep=2)
    newest = checkpoints.newest()
    step = 0
    if newest is not None:
        step = checkpoints.load(newest, model=model, optimizer=optimizer)["step"]
    train(model, optimizer, MODEL, range(1))
    background = BackgroundCheckpoints(checkpoints, model=model) if way == "in the background" else None
    if rank == 0:
        (folder / "ready").touch()
    while True:
        step += 1
        if way == "loading":
            checkpoints.load(newest, model=model, optimizer=optimizer)
        elif background is not None:
            background.save(optimizer=optimizer, state={"step": step}, step=step)
            for _ in range(3):  # steps: it is finished at one of them, or the next save waits for it
                time.sleep(0.02)
                settle(background, model)
        else:
            checkpoints.save(model=model, optimizer=optimizer, state={"step": step}, step=step)


def _look(rank: int, world: int, folder: Path) -> int:
    model, optimizer = make(MODEL, bf16=False)
    checkpoints = Checkpoints(folder, keep=2)
    step = checkpoints.load(checkpoints.newest(), model=model, optimizer=optimizer)["step"]
    dist.barrier()
    assert unfinished(folder) == []
    return step


@pytest.mark.parametrize(
    ("victim", "way"), [(0, "saving"), slow(1, "loading"), slow(0, "in the background"), slow(1, "in the background")]
)
def test_killed_at_any_moment(tmp_path: Path, victim: int, way: str) -> None:
    """The other rank names the dead one; the newest checkpoint is whole; the next run takes away what is left."""
    saved_twice(tmp_path)
    for moment in range(3):
        (tmp_path / "ready").unlink(missing_ok=True)
        with ranks.start(_until_killed, 2, tmp_path, way) as job:
            deadline = time.monotonic() + LONG_S
            while not (tmp_path / "ready").exists():
                assert time.monotonic() < deadline
                time.sleep(0.01)
            time.sleep(0.05 + 0.037 * moment)  # a save takes about 0.1 s
            job.processes[victim].kill()
            outcomes = job.join()
        assert outcomes[victim].signal == signal.SIGKILL
        assert outcomes[1 - victim].error_type == RankLost.__name__, outcomes[1 - victim].error
        assert f"rank {victim} died" in outcomes[1 - victim].error
        for path in Checkpoints(tmp_path, keep=2).all():
            verify(path)
    steps = ranks.run(_look, 2, tmp_path)
    assert steps[0] == steps[1] >= 2
