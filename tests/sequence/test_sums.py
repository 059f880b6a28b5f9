"""Sums over the segments of a sample, between a pack's forward and its backward: they are right in every minibatch, and
a rank that fails, dies or stands still there is named by all others.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from threading import Thread
from typing import Any

import psutil
import pytest
import torch

from odc_triton import MinibatchFailed, enable_split, fully_shard
from odc_triton.base.errors import OfRanks
from odc_triton.hf import summed_loss
from odc_triton.plan.entries import Segment
from odc_triton.plan.segments import SplitPlan
from odc_triton.sequence.exchange import SequenceExchange
from odc_triton.sequence.sums import SampleSums
from tests.support import ranks, slow
from tests.support.deadlines import LONG_S
from tests.support.splitting import DEALS, LENGTHS, Dealt, P, Setup, build, require_plain, sharded, step_on

Loss = Callable[[torch.nn.Module, dict], torch.Tensor]
Groups = tuple[tuple[int, int], ...]  # (sample, group)


def with_sums(sums: SampleSums, deal: Dealt, factor: float = 1.0, groups: Groups = (), seen: Any = None) -> Loss:
    """A pack's loss; before it the tokens of segments, `factor` times, are summed over ranks, without last segments of
    all samples but the first; or those of groups. `seen`: to be filled with the sums.
    """
    segments = [each for of_rank in deal for pack in of_rank for each in pack if isinstance(each, Segment)]
    label = {sample: sample for sample in range(len(LENGTHS))} | dict(groups)

    def counts(segment: Segment) -> bool:
        return bool(groups) or segment.stop < LENGTHS[segment.sample] or segment.sample == 0

    def loss_of(model: torch.nn.Module, pack: dict) -> torch.Tensor:
        loss = summed_loss(model, pack)
        own: dict[int, torch.Tensor] = {}
        for segment in filter(None, pack.get("segments", ())):
            if counts(segment):
                one = torch.tensor([len(segment), 1.0], dtype=torch.float64)
                own[label[segment.sample]] = own.get(label[segment.sample], 0.0) + factor * one
        for group, found in sums.over_ranks(own, counts, label.__getitem__).items():
            some = [len(each) for each in segments if label[each.sample] == group and counts(each)]
            assert found.tolist() == pytest.approx([factor * sum(some), factor * len(some)], rel=1e-15), group
            if seen is not None:
                seen[group] = found.tolist()
        return loss

    return loss_of


# Samples 0 and 2 are a pair.
PAIR: Groups = ((0, -7), (2, -7))
BETWEEN: Dealt = [[[P(0, 0, 41), 3]], [[P(2, 0, 30), 1]]]
OF_A_BRANCH: Dealt = [[[P(0, 0, 41)]], [[P(2, 7, 30, 0), 3], [1]]]
TWO_PAIRS: Dealt = [[[P(0, 0, 20)], [P(1, 0, 17)]], [[P(0, 20, 41), P(2, 0, 10)]], [[P(2, 10, 30)], [P(3, 0, 9)]]]
SUMS: dict[int, list[tuple[Setup, Dealt]]] = {
    2: [(Setup(groups=PAIR), BETWEEN), (Setup(prefix=8, groups=PAIR), OF_A_BRANCH)],
    3: [
        (Setup(), DEALS["zigzag"]),
        (Setup(prefix=8, backend="cpu-sharded"), DEALS["cut tree"]),
        (Setup(prefix=8), DEALS["tree waves"]),
        (Setup(groups=(*PAIR, (1, 10**12), (3, 10**12))), TWO_PAIRS),
    ],
}
APART: Dealt = [[[P(0, 0, 20)], [P(2, 0, 10)]], [[P(0, 20, 41)], [P(2, 10, 30)]]]


def _right(rank: int, world: int) -> list[dict[int, list[float]]]:
    """By case, the last minibatch's sums."""
    made, cases = {}, []
    for setup, deal in SUMS[world]:
        if setup.backend not in made:
            model = sharded(setup, rank)
            made[setup.backend] = model, SampleSums(model, samples=len(LENGTHS))
        model, sums = made[setup.backend]
        for factor in (1.0, 1 / 3):
            model.zero_grad()
            cases.append({})
            loss_of = with_sums(sums, deal, factor, setup.groups, cases[-1])
            _, found = step_on(model, setup, rank, loss_of=loss_of, deal=deal)
        require_plain(found, Setup(prefix=setup.prefix))
    if world == 2:
        with pytest.raises(MinibatchFailed, match="several waves: make the plan with these groups"):
            step_on(model, Setup(), rank, loss_of=with_sums(sums, APART, groups=PAIR), deal=APART)
    return cases


@pytest.mark.parametrize("world", [slow(2), 3])
def test_sums_of_all_ranks(world: int) -> None:
    for of_ranks in zip(*ranks.run(_right, world), strict=True):
        for group in set().union(*of_ranks):
            assert len({tuple(each[group]) for each in of_ranks if group in each}) == 1, "other bits"


def _strikes(where: str, strike: Callable[[], None], wait_for: Callable[[], None] | None = None) -> None:
    """This rank does that before it writes its sums, or once it shows that it waits for another's; `wait_for`: the
    others write theirs after that.
    """
    over_ranks, show = SampleSums.over_ranks, SampleSums._show

    def on_sums(self: SampleSums, *given: Any) -> Any:
        if wait_for is not None:
            wait_for()
        elif where == "write":
            strike()
        return over_ranks(self, *given)

    def on_show(self: SampleSums, wave: int, rank: int = -1) -> None:
        show(self, wave, rank)
        if rank >= 0 and where == "wait":
            strike()

    SampleSums.over_ranks = on_sums
    if wait_for is None:
        SampleSums._show = on_show


def _fails(rank: int, world: int) -> str:
    """What was said when rank 1 failed before it wrote its sums. The next minibatch is right."""
    setup = Setup(deal="zigzag")
    model, own = sharded(setup, rank), SampleSums.over_ranks
    sums = SampleSums(model, samples=len(LENGTHS))

    def raises() -> None:
        raise torch.OutOfMemoryError("no memory for 3 GiB")

    if rank == 1:
        _strikes("write", raises)
    with pytest.raises(MinibatchFailed) as caught:
        step_on(model, setup, rank, loss_of=with_sums(sums, DEALS["zigzag"], 5.0))
    SampleSums.over_ranks = own
    model.zero_grad()
    _, found = step_on(model, setup, rank, loss_of=with_sums(sums, DEALS["zigzag"], 7.0))
    require_plain(found, Setup())
    return str(caught.value)


def test_a_rank_that_fails_before_it_writes_its_sums() -> None:
    for said in ranks.run(_fails, 3):
        assert "rank 1: OutOfMemoryError: no memory for 3 GiB" in said
        assert "PeerFailed" not in said


# Rank 2 needs gradients of none, and rank 1 sums of rank 0.
BEHIND: Dealt = [[[P(0, 0, 10)]], [[P(0, 10, 41), P(2, 0, 13)]], [[P(2, 13, 30)]]]
# Rank 1 needs gradients of rank 0, and rank 2 those of rank 1.
BEFORE: Dealt = [[[P(0, 13, 41)]], [[P(0, 0, 13), P(2, 13, 30)]], [[P(2, 0, 13)]]]
EVERYWHERE: Dealt = [[[P(0, 0, 10)]], [[P(0, 10, 30)]], [[P(0, 30, 41)]]]


def _beside_one_that_ends(
    rank: int, world: int, deal: Dealt, where: str, victim: int, number: int, groups: Groups
) -> tuple[str, list]:
    model = fully_shard(build(Setup(), replaced=True), timeout=LONG_S)
    enable_split(model, tokens=48)
    sums, engine = SampleSums(model, samples=len(LENGTHS)), model._odc_engine
    process = psutil.Process(engine.exchange("processes", {"pid": os.getpid()})[victim]["pid"])

    def when_it_has_ended() -> None:
        while process.is_running() and process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):
            time.sleep(0.01)

    def end_the_deadline() -> None:
        when_it_has_ended()
        waits, kv_waits = sums._waits, engine.participant(SequenceExchange).sync.waits._waits

        def all_wait() -> bool:
            at_exit = [reached > engine.barrier.passed for reached in engine.barrier._reached.seen()]
            shown = zip(waits.seen(), kv_waits.seen(), at_exit, strict=True)
            return all(own % (world + 1) or kv or done or at == victim for at, (own, kv, done) in enumerate(shown))

        while not all_wait():
            time.sleep(0.01)
        # Waits that are over are no longer shown; and rank 2 must find the cause itself.
        time.sleep(0.8 if rank == 1 else 0.4)
        engine.barrier.timeout_s = 0.0

    if rank == victim:
        _strikes(where, lambda: os.kill(os.getpid(), number))
    elif where == "wait":
        _strikes(where, lambda: None, when_it_has_ended)
    if number == signal.SIGSTOP:
        Thread(target=end_the_deadline, daemon=True).start()
    with pytest.raises(OfRanks) as caught:
        step_on(model, Setup(groups=groups), rank, loss_of=with_sums(sums, deal, groups=groups), deal=deal)
    return f"{type(caught.value).__name__}: {caught.value}", caught.value.ranks


@pytest.mark.parametrize(
    ("deal", "where", "victim", "number", "groups"),
    [
        (EVERYWHERE, "write", 1, signal.SIGKILL, ()),
        (BEHIND, "write", 0, signal.SIGSTOP, ()),
        slow(EVERYWHERE, "wait", 1, signal.SIGSTOP, ()),
        slow(BEFORE, "wait", 0, signal.SIGSTOP, ()),
        ([*BETWEEN, []], "write", 0, signal.SIGKILL, PAIR),  # no rank reads tokens
        slow([*BETWEEN, []], "write", 1, signal.SIGSTOP, PAIR),
    ],
)
def test_a_rank_that_ends_or_stands_still_is_named_alone(
    deal: Dealt, where: str, victim: int, number: int, groups: Groups
) -> None:
    assert SplitPlan.of(deal, groups=dict(groups)) is not None
    with ranks.start(_beside_one_that_ends, 3, deal, where, victim, number, groups) as job:
        others = job.wait_for([rank for rank in range(3) if rank != victim])
    assert [each.error for each in others] == [None] * 2
    kind = "RankLost: " if number == signal.SIGKILL else "DeadlineExceeded: "
    for said, blamed in (each.value for each in others):
        assert said.startswith(kind), said
        assert blamed == [victim], said
    if where == "write":
        assert any("the sums over tokens" in each.value[0] for each in others), others
