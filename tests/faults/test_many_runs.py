"""Groups that train over one base: a rank is killed, stops, raises or leaves, and the others end, or go on."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from odc_triton import fully_shard, minibatch, own_mesh, serving
from odc_triton.checkpoint import save_pretrained
from odc_triton.checkpoint.folder import load_checkpoint, write_checkpoint
from odc_triton.engine.api import engine_of
from tests.support import leftovers, ranks, slow
from tests.support.adapters import adapted, adapters, frozen, train
from tests.support.deadlines import LONG_S, SHORT_S, until
from tests.support.models import microbatches
from tests.support.refusals import ended

LONG = 10**6  # steps: more than any test waits for


def _made(group: list[int], base: nn.Module | None, timeout_s: float = LONG_S) -> tuple[nn.Module, Any]:
    model = fully_shard(adapted(seed=group[0]), mesh=own_mesh(group), base=base, timeout=timeout_s)
    return model, torch.optim.SGD(adapters(model).values(), lr=0.1)


def _step(model: nn.Module, optimizer: Any, step: int, moments: Callable[[str], None] = lambda where: None) -> None:
    train(model, optimizer, microbatches("qwen2", [4, 3], step), partial(minibatch, model, tokens=1), moments)


def _killed(rank: int, world: int, victim: int, where: str, folder: Path) -> tuple[str, list[int], str, float]:
    """(kind, ranks, text) of the error, and when it came."""
    group, base = [[0, 1], [2, 3]][rank // 2], fully_shard(frozen(), timeout=LONG_S)
    barrier = engine_of(base).barrier

    def moments(now: str) -> None:
        if (rank, now) == (victim, where.partition(",")[0]):
            (folder / "killed").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)

    def work() -> None:
        with serving(base):
            model, optimizer = _made(group, base)
            _step(model, optimizer, 0)
            write_checkpoint(folder / str(group[0]), model=model, optimizer=optimizer, state={}, step=1)
            if rank == group[0]:
                save_pretrained(model, folder / f"adapter-{rank}")
            dist.barrier()
            if "mate works" in where and rank == 1:
                until(lambda: not barrier.board.is_alive(0))
            for step in range(2 if where == "serving" else LONG):
                _step(model, optimizer, step, moments)
            if rank == victim:
                until(lambda: sum(each > barrier.passed for each in barrier._reached.seen()) >= world - 1)
            moments("serving")

    return *ended(work)[:3], time.time()


def _loaded(rank: int, world: int, folder: Path) -> list[bool]:
    found = []
    for first in ("0", "2"):
        model, optimizer = _made([0], None)
        load_checkpoint(folder / first, model=model, optimizer=optimizer)
        saved = load_file(folder / f"adapter-{first}" / "adapter_model.safetensors")
        values = {key.replace(".default", ""): each for key, each in adapters(model).items()}
        found += [torch.equal(values[key].to_local(), saved[key]) for key in values]
    return found


KILLS = [(victim, where) for victim in (1, 2) for where in ("entry", "inside", "exit", "serving")]
KILLS.append((2, "entry, mate works"))  # of another group: rank 0 waits for one that will not come


@pytest.mark.parametrize(("victim", "where"), [slow(*each) for each in KILLS])
def test_a_rank_is_killed(victim: int, where: str, tmp_path: Path) -> None:
    before, others = leftovers.names(), [rank for rank in range(4) if rank != victim]
    with ranks.start(_killed, 4, victim, where, tmp_path) as job:
        outcomes = job.wait_for(others)
    killed_s = float((tmp_path / "killed").read_text())
    for rank, outcome in zip(others, outcomes, strict=True):
        assert outcome.value is not None, outcome
        kind, named, text, ended_s = outcome.value
        assert (kind, named) == ("RankLost", [victim]), (rank, text)
        assert ended_s - killed_s < 10, rank
    leftovers.assert_none_since(before)
    assert ranks.run(_loaded, 1, tmp_path) == [[True] * 16]


def _leaves(rank: int, world: int, how: str) -> tuple[tuple, list[torch.Tensor]]:
    """Rank 1 does between two steps; adapters of a rank that has made its steps."""
    group, values = [[0, 1], [0, 1], [2], [3]][rank], []
    timeout_s = 2 * SHORT_S if how in ("stops", "works") else LONG_S
    base = fully_shard(frozen(), timeout=timeout_s)

    def work() -> None:
        with serving(base):
            model, optimizer = _made(group, base, LONG_S if how == "works" else timeout_s)
            _step(model, optimizer, 0)
            dist.barrier()
            if rank == 1:
                if how == "raises":
                    raise ValueError("no luck")
                if how == "exits":
                    sys.exit(3)
                if how != "works":
                    os.kill(os.getpid(), signal.SIGINT if how == "is interrupted" else signal.SIGSTOP)
                time.sleep(3 * timeout_s)
            for step in range(1, LONG if how in ("exits", "is interrupted") else 3):
                _step(model, optimizer, step)
            values.extend(each.to_local().clone() for each in adapters(model).values())

    return ended(work), values


def _plain(rank: int) -> list[torch.Tensor]:
    model = adapted(seed=rank)
    optimizer = torch.optim.SGD(adapters(model).values(), lr=0.1)
    for step in range(3):
        train(model, optimizer, microbatches("qwen2", [4, 3], step))
    return [*adapters(model).values()]


# By how rank 1 leaves: what each rank raises, and the ranks that it names. None: it never ends.
LOST, LATE, NONE = ("RankLost", [1]), ("DeadlineExceeded", [1]), ("no error", [])
ENDS = {
    "raises": [LOST, ("ValueError", []), NONE, NONE],
    "exits": [LOST, ("SystemExit", []), LOST, LOST],
    "is interrupted": [LOST, ("KeyboardInterrupt", []), LOST, LOST],
    "stops": [LATE, None, LATE, LATE],
    "works": [NONE] * 4,
}


@pytest.mark.parametrize("how", ["raises", *map(slow, list(ENDS)[1:])])
def test_a_rank_leaves(how: str) -> None:
    ending = [rank for rank, end in enumerate(ENDS[how]) if end is not None]
    with ranks.start(_leaves, 4, how) as job:
        outcomes = job.wait_for(ending)
    for rank, outcome in zip(ending, outcomes, strict=True):
        assert outcome.value is not None, outcome
        (kind, named, text, _), values = outcome.value
        assert (kind, named) == ENDS[how][rank], text
        if (how, rank) == ("raises", 0):
            assert "rank 1 gave up (ValueError: no luck)" in text
        if kind == "no error" and rank > 1:  # alone in its group
            assert all(torch.equal(*pair) for pair in zip(values, _plain(rank), strict=True))
