"""The overlapped rollout on ranks that are threads: packs, errors of a rank, waits."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from odc_triton.base.errors import GenerationAborted, RolloutFailed
from odc_triton.jobs.rl.overlap import OverlappedRollout
from odc_triton.plan.cost import CostModel
from odc_triton.plan.plan import MinibatchPacks
from odc_triton.plan.samples import Limits
from tests.support.overlapped import Batch, Plan, Sampling, Store

GROUPS = ((3, 5), (), (4,), (6, 3, 3), ())


def run_ranks(plan: Plan, seed: int = 0, raises: bool = False) -> tuple[list[OverlappedRollout], list[int]]:
    """The code itself, a thread for each rank: their rollouts, after them, and what was computed."""
    chance, computed = random.Random(seed), []
    store = Store(lambda: time.sleep(chance.choice((0, 0, 1e-4, 1e-3))))
    rollouts, ranks = [], []
    for rank in range(plan.ranks):
        packs = lambda rows, _, rank=rank: MinibatchPacks([n] for n in rows.names[rank :: plan.ranks])  # noqa: E731
        limits, cost = Limits(ranks=plan.ranks, token_cap=8), CostModel(quadratic=0, linear=1)
        planner = SimpleNamespace(limits=limits, reads_others=plan.keeps, packs=packs)
        sampler = Sampling(rank, plan, store, raises=raises)
        rollout = OverlappedRollout(sampler, planner, cost, shares_prefixes=False, scale="none")
        rollout.open(sampler.slots, None, Batch(plan.groups))
        rollouts.append(rollout)

        def run(rollout: OverlappedRollout = rollout) -> None:
            for pack in rollout:
                store.nap()
                computed.extend(pack)
            rollout.leave()

        ranks.append(threading.Thread(target=run, daemon=True))
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(5.0)
        assert not each.is_alive(), f"a rank hangs: {plan}, {seed}"
    return rollouts, computed


def test_the_code_itself() -> None:
    for seed in range(16):
        plan = Plan(groups=GROUPS, ranks=2 + seed % 2, threads=2 * (seed // 2 % 2), together=2, keeps=seed % 8 > 3)
        rollouts, computed = run_ranks(plan, seed)
        assert sorted(computed) == sorted(Batch(GROUPS).tokens)
        messages = [each.exit() for each in rollouts]
        assert messages == [None] * plan.ranks
        for each in rollouts:
            each.settle(messages)
        assert rollouts[0].sampler.counter.values == {}


@pytest.mark.parametrize(("own_prompt", "shared"), [(None, 39), ([1] * 50, 0)])
def test_prompts_that_a_function_changed_are_not_shared(own_prompt: list[int] | None, shared: int) -> None:
    """Else a pack would hold more tokens than its cap. Of 40 tokens the last is computed by each completion."""
    plan = Plan(groups=((45, 56),), ranks=1)
    sampler, limits = Sampling(0, plan, Store(lambda: None)), Limits(ranks=1, token_cap=100)
    sampler.slots[0].prompt.ids = [0] * 40
    sampler.group = lambda made: (
        [SimpleNamespace(prompt=None), SimpleNamespace(prompt=own_prompt)],
        None,
        torch.zeros(2),
    )
    planner = SimpleNamespace(limits=limits, reads_others=False)
    rollout = OverlappedRollout(sampler, planner, CostModel.paper_7b(), shares_prefixes=True, scale="none")
    rollout.open(sampler.slots, None, Batch(plan.groups))
    with mock.patch.object(rollout._arrivals, "came") as came:
        rollout._came({"slot": 0})
    came.assert_called_once_with({0: 45, 1: 56}, shared)


@pytest.mark.parametrize("threads", [0, 2])
def test_a_function_that_exits_ends_the_step(threads: int) -> None:
    """sys.exit in a thread ends nothing but the thread."""
    rollouts, _ = run_ranks(Plan(groups=GROUPS, threads=threads), raises=True)
    messages = [each.exit() for each in rollouts]
    for each in rollouts:
        with pytest.raises(RolloutFailed, match=r"rank \d: SystemExit: no completion"):
            each.settle(messages)


def test_the_thread_that_failed_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has aborted what others asked the server for, and they may be sooner to fail."""

    def complete(self: Sampling, taken: range, *_: object) -> list:
        if taken[0]:
            raise GenerationAborted
        time.sleep(0.05)
        raise ValueError("why")

    monkeypatch.setattr(Sampling, "complete", complete)
    (rollout,), _ = run_ranks(Plan(groups=((), ()), ranks=1, threads=2))
    with pytest.raises(RolloutFailed, match="ValueError: why"):
        rollout.settle([rollout.exit()])


def test_a_wait_ends_with_each_completion() -> None:
    """Its deadline is for one, not for all."""
    (rollout, _), _ = run_ranks(Plan(groups=((),), keeps=True))
    rollout.open(rollout._slots * 3, None, Batch(((),) * 3))
    waits: list[list[int]] = []

    def wait_for(purpose: str, missing: Callable[[], list[int]]) -> None:
        waits.append(missing())
        rollout._log.write({"came": {"slot": len(waits) - 1}, "at_s": 0})
        missing()
        assert not missing()

    rollout.engine.barrier, rollout.sampler.take = SimpleNamespace(wait_for=wait_for), lambda *_: range(0)
    assert not [*rollout]
    assert waits == [[1]] * 3
