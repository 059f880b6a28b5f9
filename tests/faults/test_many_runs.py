"""Groups that train over one base: a rank is killed, stops, raises or leaves, and the others end, or go on."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from odc_triton import fully_shard, minibatch, own_mesh, serving
from odc_triton.base.errors import OdcError
from odc_triton.checkpoint import save_pretrained
from odc_triton.checkpoint.folder import load_checkpoint, write_checkpoint
from odc_triton.engine.api import engine_of
from tests.support import leftovers, ranks, slow
from tests.support.deadlines import LONG_S, SHORT_S
from tests.support.families import with_lora
from tests.support.models import CASES, build, microbatches

GROUPS = [[0, 1], [2, 3]]
LONG = 10**6  # steps: more than any test waits for
Made = tuple[nn.Module, torch.optim.Optimizer]


def _base(timeout_s: float = LONG_S) -> nn.Module:
    return fully_shard(build("qwen2").requires_grad_(False), timeout=timeout_s)


def _made(group: list[int], base: nn.Module | None, timeout_s: float = LONG_S) -> Made:
    model = with_lora(build("qwen2"), seed=group[0])
    model.peft_config["default"].base_model_name_or_path = "some/folder"
    fully_shard(model, mesh=own_mesh(group), base=base, timeout=timeout_s)
    return model, torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=1e-3)


def _step(made: tuple, step: int, moments: Any = lambda where: None) -> None:
    moments("entry")
    with minibatch(made[0], tokens=1):
        for batch in microbatches("qwen2", [4, 3], seed=step):
            loss = CASES["qwen2"].loss(made[0], batch)
            moments("inside")
            loss.backward()
        moments("exit")
    made[1].step()
    made[1].zero_grad()


def _others_wait(engine: Any) -> None:
    while sum(reached > engine.barrier.passed for reached in engine.barrier._reached.seen()) < engine.world - 1:
        time.sleep(0.01)


def _ends(action: Any) -> tuple[str, list[int], str, float]:
    try:
        action()
    except (OdcError, ValueError, KeyboardInterrupt, SystemExit) as error:
        return type(error).__name__, getattr(error, "ranks", []), str(error), time.time()
    return "no error", [], "", time.time()


def _killed(rank: int, world: int, victim: int, where: str, folder: Path) -> tuple[str, list[int], str, float]:
    group = next(each for each in GROUPS if rank in each)
    base = _base()

    def moments(now: str) -> None:
        if (rank, now) == (victim, where):
            (folder / "killed").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)

    def work() -> None:
        with serving(base):
            made = _made(group, base)
            _step(made, 0)
            write_checkpoint(folder / str(group[0]), model=made[0], optimizer=made[1], state={}, step=1)
            if rank == group[0]:
                save_pretrained(made[0], folder / f"adapter-{rank}")
            dist.barrier()
            for step in range(2 if where == "serving" else LONG):
                _step(made, step, moments)
            if rank == victim:
                _others_wait(engine_of(base))
                moments("serving")

    return _ends(work)


def _loaded(rank: int, world: int, folder: Path) -> list[bool]:
    found = []
    for group in GROUPS:
        made = _made([0], None)
        load_checkpoint(folder / str(group[0]), model=made[0], optimizer=made[1])
        saved = load_file(folder / f"adapter-{group[0]}" / "adapter_model.safetensors")
        values = {key.replace(".default", ""): each for key, each in made[0].named_parameters() if each.requires_grad}
        found += [torch.equal(values[key].to_local(), saved[key]) for key in saved]
    return found


KILLS = [(victim, where) for victim in (1, 2) for where in ("entry", "inside", "exit", "serving")]


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
    ((found),) = ranks.run(_loaded, 1, tmp_path)
    assert len(found) == 24
    assert all(found)


def _leaves(rank: int, world: int, how: str) -> tuple[Any, list[torch.Tensor]]:
    """Rank 1 leaves between two steps; the adapters of each rank after it was done, [] if it was not."""
    group, values, timeout_s = (
        [[0, 1], [0, 1], [2], [3]][rank],
        [],
        2 * SHORT_S if how in ("stops", "works") else LONG_S,
    )
    base = _base(timeout_s)

    def work() -> None:
        with serving(base):
            made = _made(group, base, LONG_S if how == "works" else timeout_s)
            _step(made, 0)
            dist.barrier()
            if rank == 1:
                if how == "raises":
                    raise ValueError("no luck")
                if how == "exits":
                    sys.exit(3)
                if how in ("is interrupted", "stops"):
                    os.kill(os.getpid(), signal.SIGINT if how == "is interrupted" else signal.SIGSTOP)
                time.sleep(3 * timeout_s)
            if how in ("exits", "is interrupted") and rank > 1:
                for step in range(1, LONG):
                    _step(made, step)
            for step in range(1, 3):
                _step(made, step)
            values.extend(each.to_local().clone() for each in made[0].parameters() if each.requires_grad)

    return _ends(work), values


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
    with ranks.start(_leaves, 4, how) as job:
        outcomes = job.wait_for([rank for rank in range(4) if ENDS[how][rank] is not None])
    for rank, (expected, outcome) in enumerate(zip(filter(None, ENDS[how]), outcomes, strict=True)):
        assert outcome.value is not None, outcome
        (kind, named, text, _), values = outcome.value
        assert (kind, named) == expected, text
        if how == "raises" and named:
            assert "rank 1 gave up (ValueError: no luck)" in text
        if (how, kind) == ("raises", "no error"):
            assert all(torch.equal(*pair) for pair in zip(values, _plain(rank), strict=True))


def _plain(rank: int) -> list[torch.Tensor]:
    """The adapters that a single process trains."""
    model = with_lora(build("qwen2"), seed=rank)
    optimizer = torch.optim.SGD(adapters := [each for each in model.parameters() if each.requires_grad], lr=1e-3)
    for step in range(3):
        for batch in microbatches("qwen2", [4, 3], seed=step):
            CASES["qwen2"].loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return adapters
