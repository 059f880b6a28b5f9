"""One of two processes is killed while it trains: the other names it, and nothing stays behind."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path

import pytest
import torch

from tests.gpu.marks import MARKS, gpu_of, take_gpu
from tests.support import ranks
from tests.support.blocks import batch, build
from tests.support.deadlines import LONG_S
from tests.support.leftovers import assert_none_since, names

pytestmark = MARKS
NAMED_WITHIN_S = 10  # what the library promises for a process that is gone
SLACK_BYTES = 64 * 2**20  # what others on the machine may take meanwhile; a context alone is several times that


def train_until_killed(
    rank: int, world: int, victim: int, where: str, folder: str
) -> tuple[str, list[int], str, float]:
    """Trains three minibatches, in the second of which `victim` kills itself at `where`; the error that this rank saw:
    its name, ranks and text, and how long after the last thing that went well it came.
    """
    from odc_triton import fully_shard, minibatch
    from odc_triton.base.errors import OdcError

    tempfile.tempdir = folder
    os.environ["TMPDIR"] = folder
    take_gpu(rank)
    model = fully_shard(build(), backend="cuda", timeout=LONG_S)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    well_s = time.monotonic()

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    try:
        for step in range(3):
            dies = rank == victim and step == 1
            with minibatch(model, tokens=1):
                if dies and where == "forward":
                    model.blocks[1].register_forward_hook(die)
                output = model(batch(0).cuda())
                if dies and where == "backward":
                    output.register_hook(die)
                output.sum().backward()
                well_s = time.monotonic()
            if dies and where == "step":
                optimizer.register_step_pre_hook(die)
            optimizer.step()
    except OdcError as error:
        return type(error).__name__, getattr(error, "ranks", []), str(error), time.monotonic() - well_s
    return "no error", [], "", time.monotonic() - well_s


def check(job: ranks.Job, victim: int, before: set[str], folder: Path) -> None:
    outcomes = job.join(60)
    assert outcomes[victim].signal == signal.SIGKILL, outcomes[victim].error
    survivor = outcomes[1 - victim]
    assert survivor.error is None, survivor.error
    kind, named, text, waited_s = survivor.value
    assert kind == "RankLost", text
    assert named == [victim]
    assert f"rank {victim} died" in text
    assert waited_s < NAMED_WITHIN_S
    assert not any(process.is_alive() for process in job.processes)
    # Compilers keep folders of their own there.
    assert [path.name for path in folder.iterdir() if path.name.startswith(("odc", "symm_mem"))] == []
    assert_none_since(before)


def free_bytes() -> int:
    """Of the GPUs that two ranks take."""
    return sum(torch.cuda.mem_get_info(index)[0] for index in {gpu_of(0), gpu_of(1)})


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("where", ["forward", "backward", "step"])
def test_killed(where: str, victim: int, tmp_path: Path) -> None:
    """With the store in rank 0, rank 0 is the one that dies: nobody else may be needed to name it."""
    torch.cuda.init()
    free_before, before = free_bytes(), names()
    given = (victim, where, str(tmp_path))
    with ranks.start(train_until_killed, 2, *given, store_in_rank_0=victim == 0) as job:
        check(job, victim, before, tmp_path)
    deadline_s = time.monotonic() + 10  # the driver frees a dead process's memory when it comes to it
    while free_bytes() < free_before - SLACK_BYTES:
        assert time.monotonic() < deadline_s, "memory of the GPU stays taken"
        time.sleep(0.1)
