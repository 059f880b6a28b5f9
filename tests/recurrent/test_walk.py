"""[Note: rows, states]: all interleavings of a recurrent layer over small plans end, and one stops as soon as the order
of its rows and states is dropped.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from odc_triton.engine.transport import Streams
from odc_triton.plan.cuts import CutPlan
from odc_triton.plan.segments import SplitPlan
from odc_triton.recurrent.convolution import convolve_documents
from odc_triton.recurrent.documents import documents_of
from odc_triton.recurrent.rules import Affine, Rule
from odc_triton.recurrent.run import run_documents
from odc_triton.sequence.buffers import LayerShape
from odc_triton.sequence.exchange import SequenceExchange
from odc_triton.sequence.layer import LayerSplit
from tests.sequence import test_walk
from tests.sequence.test_walk import Deal, Steps, stuck

KERNEL = 3  # rows before a token, and their number at a cut; some segments are shorter
ORDER = ("publish rows", "read rows", "publish states", "read states")
BACKWARD = ("add states", "collect states", "add rows", "collect rows")
DEALS = [deal for waves in test_walk.WAVES.values() for deal in waves]


def steps_of(deal: Deal, forward: tuple[str, ...] = ORDER, backward: tuple[str, ...] = BACKWARD) -> Steps:
    """What ranks do in one layer of a microbatch. A convolution's output, and so states, need the rows before."""
    plan = SplitPlan.of(deal)
    plans = {"rows": CutPlan(plan, KERNEL, states=False), "states": CutPlan(plan, 1, states=True)}
    calls = [*forward, *backward]

    def awaited(rank: int, call: str) -> set[tuple[int, int]]:
        kind, what = call.split()
        own = [each.segment for each in plan.of_rank(rank)]
        if kind == "read":
            others = {read.holder.rank for segment in own for read in plans[what].reads(segment)}
            return {(other, calls.index(f"publish {what}")) for other in others}
        if kind == "collect":
            others = {reader.rank for segment in own for reader in plans[what].readers(segment)}
            return {(other, calls.index(f"add {what}")) for other in others}
        return set()

    return [[sorted(awaited(rank, call)) for call in calls] for rank in range(len(deal))]


def test_no_plan_can_stop() -> None:
    assert len(DEALS) > 50
    assert all(stuck(steps_of(deal)) is None for deal in DEALS)


@pytest.mark.parametrize(
    "orders",
    [
        {"forward": ("read rows", "publish rows", "publish states", "read states")},
        {"forward": ("publish rows", "read rows", "read states", "publish states")},
        {"forward": ("read states", "publish rows", "read rows", "publish states")},
        {"backward": ("collect states", "add states", "add rows", "collect rows")},
        {"backward": ("add states", "collect states", "collect rows", "add rows")},
        {"backward": ("collect rows", "add states", "collect states", "add rows")},
    ],
)
def test_in_another_order_a_plan_stops(orders: dict[str, tuple[str, ...]]) -> None:
    assert sum(stuck(steps_of(deal, **orders)) is not None for deal in DEALS) > 1


class Sum(Rule):
    """S becomes S + the rows' sum."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.inputs = self.terms = (rows,)
        self.keys, self._kernel = 1, None

    def run(self, first, end, state):
        rows = self.inputs[0][:, first:end].cumsum(1) + (0 if state is None else state)
        return rows, rows[:, -1:]

    def affine(self, first, end, before):
        rows, state = self.run(first, end, None if before is None else before.b)
        return rows, torch.ones_like(rows), Affine(torch.ones_like(state), state)

    @staticmethod
    def after(state, step):
        return step.a * state + step.b

    def known(self, state):
        return Affine(torch.zeros_like(state), state)

    def _by_kernel(self, *_, **__):
        raise AssertionError("on a GPU")


def test_waits_of_the_code_are_those_of_the_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    def recorded(deal: Deal, layers: int, **_: object) -> list:
        plan, found = SplitPlan.of(deal), []
        for rank, (pack,) in enumerate(deal):
            sync = test_walk.Recorded(rank, len(deal), layers, layers)
            rows = LayerShape(heads=1, widths=(1,), dtype="float32", rows_per_cut=KERNEL)
            sync.cuts, sync.shapes = (
                9,
                [rows, LayerShape(heads=1, widths=(1, 1), dtype="float32", rows_per_cut=1, states=True)],
            )
            exchange = SequenceExchange(sync, Streams(), grid=SimpleNamespace(), in_order=False)
            exchange.begin(plan)
            if pack:
                bounds = [0, *itertools.accumulate(map(len, pack))]
                spans = exchange.spans(bounds, pack)
                documents = documents_of(bounds, pack, plan=plan, cuts=exchange.cuts, rank=rank)
                inputs, sides = (
                    torch.zeros(1, 1, bounds[-1], requires_grad=True),
                    [LayerSplit(exchange, n) for n in (0, 1)],
                )
                own = convolve_documents(lambda given: 2 * given, inputs, KERNEL, documents, sides[0], spans)
                run_documents(Sum(own.transpose(1, 2)[..., None]), documents, sides[1], spans).sum().backward()
            exchange.leave()
            found.append(sync.done)
        return found

    monkeypatch.setattr(test_walk, "recorded", recorded)
    for deal in DEALS[::4]:
        found, want = test_walk.steps_of_code(deal, in_order=False, in_flight=2), steps_of(deal)
        assert stuck(found) is None
        for mine, theirs in zip(found, want, strict=True):
            assert [{rank for rank, _ in step} for step in mine if step] == [
                {rank for rank, _ in step} for step in theirs if step
            ], deal


def test_a_plan_needs_room_also_of_a_reference_model() -> None:
    """Which opens the policy's plan on buffers of its own."""
    (deal, *_) = DEALS
    sync = test_walk.Recorded(0, len(deal), 1, 1)
    sync.cuts, sync.shapes = 0, [LayerShape(heads=1, widths=(1,), dtype="float32", rows_per_cut=KERNEL)]
    exchange = SequenceExchange(sync, Streams(), grid=SimpleNamespace(), in_order=False)
    with pytest.raises(ValueError, match=r"at \d+ places of the plan, and there is room for the states of 0: give"):
        exchange.begin(SplitPlan.of(deal), forward_only=True)
