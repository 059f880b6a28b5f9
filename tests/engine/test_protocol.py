"""The minibatch protocol: who waits for whom and when, what a gradient is made of, what a model leaves behind."""

from __future__ import annotations

import gc
import itertools
import os
import re
import signal
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_reduce
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from odc_triton import DeadlineExceeded, RankLost, full_parameters, fully_shard, minibatch
from odc_triton.comm import barrier as barrier_module
from odc_triton.comm.barrier import Barrier
from odc_triton.comm.memory.heap import StatusBoard
from odc_triton.jobs.train.agreement import own_gradients, square_norm
from tests.support import ranks
from tests.support.blocks import Blocks, batch, build
from tests.support.deadlines import LONG_S
from tests.support.gradients import gradients_of
from tests.support.refusals import caught

SOON = timedelta(seconds=LONG_S)


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def _no_barrier(rank: int, world: int) -> tuple[int, list[str]]:
    model = fully_shard(build())
    barrier = model._odc_engine.barrier
    if rank == 1:  # its first layer ends only after rank 0 has done everything
        model.blocks[0].register_forward_hook(lambda *_: _store().wait(["rank 0 is through"], SOON))
    passed = barrier.passed
    model._odc_engine.events.drain()
    with minibatch(model):
        for seed in range(1 if rank == 1 else 4):
            model(batch(seed)).sum().backward()
        if rank == 0:
            _store().set("rank 0 is through", "1")
    return barrier.passed - passed, [event.label for event in model._odc_engine.events.drain() if event.kind == "wait"]


def _many(rank: int, world: int) -> list[int]:
    model = fully_shard(build())
    keys = []
    for number in range(35):  # keys are deleted every 32 minibatches
        with minibatch(model):
            pass
        if number in (2, 34):
            keys.append(_store().num_keys())
    return keys


def _lock_wait(rank: int, world: int) -> list:
    model = fully_shard(build())
    engine = model._odc_engine
    number = next(p.number for p in engine.parameters if p.name == "head.weight")
    with minibatch(model):
        if rank == 1:
            assert engine.heap.try_lock(number, 1)
            _store().set("held", "1")
            _store().wait(["head of rank 0"], SOON)
            time.sleep(0.05)
            engine.heap.unlock(number, 1)
        else:
            _store().wait(["held"], SOON)
            output = model(batch(0))
            output.register_hook(lambda _: _store().set("head of rank 0", "1"))
            output.sum().backward()
    return model._odc_engine.events.drain()


def _interrupted_evaluation(rank: int, world: int) -> float:
    model = fully_shard(build())
    handle = model.blocks[1].register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        model(batch(0))
    handle.remove()
    assert all(isinstance(p, dist.tensor.DTensor) for p in model.parameters())
    with minibatch(model, tokens=1):  # goes on as if nothing had happened
        model(batch(0)).sum().backward()
    return model.head.bias.grad.full_tensor()[0].item()


class Branches(nn.Module):
    """`both` is used by all ranks, `second` by rank 1 alone, `never` by nobody; `frozen` doesn't train."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.both, self.second, self.never, self.frozen = (nn.Linear(4, 4) for _ in range(4))
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor, second: bool) -> torch.Tensor:
        x = self.both(self.frozen(x))
        return self.second(x) if second else x


def _partial(rank: int, world: int, tokens: bool, factor: float | None) -> tuple:
    warnings.simplefilter("ignore")  # counts that differ
    model = fully_shard(Branches())
    if factor is not None:
        model.set_gradient_divide_factor(factor)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    gradients = []
    for _ in range(2):
        with minibatch(model, tokens=1 if tokens else None):
            for seed in range((2, 1, 0)[rank]):
                model(batch(seed), second=rank == 1).square().sum().backward()
        gradients.append(gradients_of(model))
        optimizer.step()
    stepped = {name for name, p in model.named_parameters() if optimizer.state[p]}
    return gradients, stepped, dict(full_parameters(model))


def test_partial_gradients() -> None:
    cases = [(False, None, 3), (True, None, 1), (False, 5.0, 5)]  # whether there are tokens, the factor, the divisor
    found = ranks.run_all(3, *((_partial, tokens, factor) for tokens, factor, _ in cases))
    for (*_, divisor), of_ranks in zip(cases, found, strict=True):
        model = Branches()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
        want = []
        for _ in range(2):
            optimizer.zero_grad()
            for seed, second in ((0, False), (1, False), (0, True)):
                (model(batch(seed), second).square().sum() / divisor).backward()
            want.append(gradients_of(model))
            optimizer.step()
        for gradients, stepped, weights in of_ranks:
            assert stepped == {"both.weight", "both.bias", "second.weight", "second.bias"}
            wanted = want, dict(model.named_parameters())
            torch.testing.assert_close((gradients, weights), wanted, rtol=1e-4, atol=1e-5)


def _collectives(rank: int, world: int) -> dict[str, str]:
    model = fully_shard(build(), debug=True)
    alone = [dist.new_group([each]) for each in range(world)][rank]
    one, mesh = torch.ones(1), model.head.weight.device_mesh

    def in_backward() -> None:
        output = model(batch(0))
        output.register_hook(lambda _: dist.all_reduce(one))
        output.sum().backward()

    def harmless() -> None:
        dist.all_reduce(one, group=alone)
        all_reduce(one, "sum", alone)
        model(batch(0)).sum().backward()

    actions: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(one),
        "all_gather_object": lambda: dist.all_gather_object([None] * world, 1),
        "barrier": dist.barrier,
        "functional": lambda: all_reduce(one, "sum", mesh),
        "full_tensor": lambda: model.head.weight.full_tensor(),
        "inside an operator of DTensor": lambda: model.head.weight @ model.head.weight.T,
        "in backward": in_backward,
        "harmless": harmless,
    }

    def inside(action: Callable[[], object]) -> None:
        with minibatch(model):
            action()

    seen = {name: caught(partial(inside, action)) for name, action in actions.items()}
    dist.all_reduce(one)  # outside it is nobody's business
    return seen


def _in_a_row(rank: int, world: int) -> tuple[list[int], int]:
    def count() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    def once() -> None:
        model = fully_shard(Blocks())
        optimizer = torch.optim.AdamW(model.parameters())
        with minibatch(model):
            model(batch(0)).sum().backward()
        optimizer.step()

    once()
    fds = [count()]
    for _ in range(50):
        once()
    fds.append(count())
    mapped = Path("/proc/self/maps").read_text().count("odc-heap")
    last = fully_shard(Blocks())  # noqa: F841, it removes the hooks of those that were freed
    return [*fds, mapped], len(_global_optimizer_pre_hooks) + len(_global_optimizer_post_hooks)


def _own_squares(rank: int, world: int) -> tuple[float, float]:
    """This rank's part of the squared norm, and the whole norm by torch."""
    scaled = nn.Module()
    scaled.register_parameter("scale", nn.Parameter(torch.tensor(1.5)))
    scaled.forward = lambda x: x * scaled.scale
    model = fully_shard(scaled, backend="cpu")
    with minibatch(model, tokens=1):
        model(torch.ones(3)).sum().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    return square_norm(own_gradients(model.parameters())), norm.full_tensor().item()


def test_on_two_ranks() -> None:
    in_a_row, no_barrier, many, lock_wait, interrupted, collectives, squares = ranks.run_all(
        2, _in_a_row, _no_barrier, _many, _lock_wait, _interrupted_evaluation, _collectives, _own_squares
    )
    for (before, after, mapped), hooks in in_a_row:
        assert after <= before
        assert mapped == 0
        assert hooks == 2
    for passed, waits in no_barrier:
        assert passed == 2
        assert waits == ["enter minibatch 0", "leave minibatch 0"]
    for early, late in many:
        assert late <= early + 4  # each rank's key of the last two barriers; 40 barriers lie between
    first, second = lock_wait
    (wait,) = [event for event in first if event.label == "lock of head.weight"]
    (backward,) = [event for event in first if event.kind == "backward"]
    assert wait.kind == "wait"
    assert wait.minibatch == wait.microbatch == 0
    assert backward.start_s <= wait.start_s < wait.end_s <= backward.end_s
    assert not any(event.label.startswith("lock") for event in second)
    assert interrupted == [2 * 3.0] * 2  # two ranks, three rows each
    for seen in collectives:
        assert seen.pop("harmless") == "nothing was raised"
        for name, text in seen.items():
            assert text.startswith("MinibatchFailed: "), f"{name}: {text}"
            assert "inside a minibatch: ranks may run different numbers" in text, f"{name}: {text}"
        assert "collective allreduce_ " in seen["all_reduce"]
    assert sum(own for own, _ in squares) ** 0.5 == squares[0][1] == 6.0, "a scalar counts once in the norm"


class _Ended(StatusBoard):
    """Status of a peer whose process is gone. `given_up`: it said so before."""

    given_up = 0

    def is_alive(self, rank: int) -> bool:
        return rank == 0

    def show(self, slot: int, value: int) -> None:
        pass

    def seen(self, slot: int) -> list[int]:
        return [0, self.given_up]


def test_one_that_came_and_then_ended_is_not_blamed() -> None:
    barrier = Barrier(store=dist.HashStore(), rank=0, world=2, timeout_s=1.0)
    barrier.watch(_Ended())
    barrier.require_alive([1], "the end", list)  # it came between the look at it and the look at its life
    with pytest.raises(RankLost, match="rank 1 died"):
        barrier.require_alive([1], "the end", lambda: [1])


def test_a_deadline_that_passes_because_a_rank_died() -> None:
    """Wherever this rank waited, and for whom."""
    barrier = Barrier(store=dist.HashStore(), rank=0, world=2, timeout_s=LONG_S)
    barrier.watch(board := _Ended())
    late = DeadlineExceeded([], "the device is busy")
    with pytest.raises(RankLost, match="rank 1 died"):
        barrier.raise_late("the end", late)
    board.given_up = 1  # as one that another rank kept waiting
    with pytest.raises(DeadlineExceeded, match="the device is busy"):
        barrier.raise_late("the end", late)


@pytest.mark.parametrize(
    ("waits", "roots"), [({1: 2, 2: 3}, [3]), ({1: 2, 2: 1}, [1]), ({1: 2, 2: 3, 3: 2}, [1]), ({}, [1])]
)
def test_a_rank_in_a_cycle_of_waits_is_its_own_root(waits: dict[int, int], roots: list[int]) -> None:
    barrier = Barrier(store=dist.HashStore(), rank=0, world=4, timeout_s=1.0)
    barrier._reached = SimpleNamespace(seen=lambda: [0] * 4)
    barrier.blocked_on += [{0: 1}.get, waits.get]  # each feature's
    assert barrier.root_cause([1]) == roots


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The barriers': each nap is a second."""
    clock = SimpleNamespace(now_s=0.0)
    clock.monotonic = lambda: clock.now_s
    clock.sleep = lambda _: setattr(clock, "now_s", clock.now_s + 1.0)
    monkeypatch.setattr(barrier_module, "time", clock)
    return clock


def test_a_wait_warns_after_half_of_its_deadline_and_then_seldom(
    caplog: pytest.LogCaptureFixture, clock: SimpleNamespace
) -> None:
    barrier = Barrier(store=dist.HashStore(), rank=0, world=2, timeout_s=1000.0)
    with pytest.raises(DeadlineExceeded, match=r"waited 1001\.0 s for rank 1 at 'the end': the deadline has passed"):
        barrier.wait_until("the end", lambda: [1])
    waited = [re.search(r"waited (\d+)", record.getMessage())[1] for record in caplog.records]
    assert waited == ["61", "121", "241", "481", "961"]


def test_the_deadline_of_a_working_rank_counts_from_its_last_sign(clock: SimpleNamespace) -> None:
    """Rank 1 makes signs for 5,000 s; rank 2 makes none."""
    barrier = Barrier(store=dist.HashStore(), rank=0, world=3, timeout_s=1000.0)
    shown: dict[int, int] = {}
    barrier.watch(
        SimpleNamespace(
            new_slot=itertools.count().__next__,
            show=shown.__setitem__,
            seen=lambda slot: [0, min(int(clock.now_s), 5000) if slot == barrier._signs.slot else 0, 0],
            is_alive=lambda _: True,
        )
    )
    with pytest.raises(DeadlineExceeded, match=r"waited 1001\.0 s for rank 2 at .*\): the deadline") as late:
        barrier.wait_until("the end", lambda: [1, 2])
    assert late.value.ranks == [2]
    clock.now_s = 0.0
    words = r"waited 6001\.0 s for rank 1 at .*, with no sign of life for 1001\.0 s: the deadline has passed"
    with pytest.raises(DeadlineExceeded, match=words):
        barrier.wait_until("the end", lambda: [1])
