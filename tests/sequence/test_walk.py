"""All interleavings of small plans: under the rules of [Note: waves] no state in which every rank waits, and one as
soon as any of them is dropped.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from odc_triton.engine.transport import Streams
from odc_triton.plan.entries import Entry, Segment
from odc_triton.plan.segments import PlannedSegment, SplitPlan
from odc_triton.sequence.buffers import Flag, LayerShape
from odc_triton.sequence.exchange import SequenceExchange
from odc_triton.sequence.layer import LayerSplit, RowsOfOthers
from odc_triton.sequence.sync import OwnFlag, Wait
from tests.support.relatives import reads

RANKS, LAYERS = 3, 2
Segments = tuple[Segment, ...]
Deal = list[list[list[Entry]]]
Steps = list[list[list[tuple[int, int]]]]  # by rank and step, the (rank, step) that must be done before


def tree(*branches: tuple[int, int]) -> Segments:
    """Sample 0, then samples 1, 2, … that branch from (sample, token)."""
    return (Segment(0, 0, 9), *(Segment(n, start, 9, of) for n, (of, start) in enumerate(branches, 1)))


TREES: dict[str, Segments] = {
    "a group": tree(*[(0, 4)] * 5),
    "three levels": tree((0, 4), (1, 6), (0, 4), (3, 6), (3, 6)),
    "turns": tree((0, 3), (1, 4), (2, 5), (3, 6), (4, 7)),
    "a prefix in two segments": (Segment(0, 0, 3), Segment(0, 3, 9), *tree((0, 2), (0, 4), (0, 4), (0, 6))[1:]),
    "a branch in two segments": (
        Segment(0, 0, 9),
        Segment(1, 4, 6, 0),
        Segment(1, 6, 9),
        *tree((0, 4), (1, 5), (1, 6), (1, 8))[2:],
    ),
}


def steps_of(
    deal: Deal,
    *,
    in_order: bool = False,
    in_flight: int = LAYERS,
    waits_first: bool = False,
    collects_first: bool = False,
    empties_late: bool = False,
) -> Steps:
    """What ranks do in the packs with segments, layer by layer: publish, attend; then, from the last layer on, publish
    and attend again if the layer's buffer has served another since, add, collect.

    `in_order`: a rank adds after lower ones that add to the same segments (exact sums). `in_flight`: before it
    publishes, a rank waits until others have attended to the layer that has the buffer. The others drop rule 3, or this
    one.
    """
    forward = ("attend", "publish") if waits_first else ("publish", "attend")
    backward = ("collect", "add") if collects_first else ("add", "collect")
    calls = [*itertools.product(range(LAYERS), forward)]
    for layer in reversed(range(LAYERS)):
        again = ("publish again", "attend again") if layer + in_flight < LAYERS else ()
        calls += itertools.product([layer], (*again, *backward))
    packs = [[pack for pack in packs if isinstance(pack[0], Segment)] for packs in deal]
    segments = [segment for of_rank in packs for pack in of_rank for segment in pack]
    sources = {segment: reads(segments, segment) for segment in segments}
    readers = {segment: [each for each in segments if segment in sources[each]] for segment in segments}
    place = {
        (segment, *call): (rank, number * len(calls) + at)
        for rank, of_rank in enumerate(packs)
        for number, pack in enumerate(of_rank)
        for segment in pack
        for at, call in enumerate(calls)
    }

    rank_of = {segment: rank for (segment, _, _), (rank, _) in place.items()}

    def awaited(rank: int, pack: Segments, layer: int, kind: str) -> Iterator[tuple[int, int]]:
        for segment in pack:
            added = [(source, each) for source in sources[segment] for each in readers[source] if in_order]
            others = {
                "publish": [(each, "attend") for each in readers[segment]],
                "attend": [(each, "publish") for each in sources[segment]],
                "publish again": [],
                "attend again": [(each, "publish again") for each in sources[segment]],
                # What is on the source's own rank is added to it by autograd.
                "add": [
                    (each, "add")
                    for source, each in added
                    if rank_of[source] not in (rank, rank_of[each]) and rank_of[each] < rank
                ],
                "collect": [(each, "add") for each in readers[segment]],
            }
            of = layer - in_flight + empties_late if kind == "publish" else layer
            if of >= 0:
                yield from (place[each, of, awaits] for each, awaits in others[kind] if rank_of[each] != rank)

    return [
        [sorted(set(awaited(rank, pack, *call))) for pack in of_rank for call in calls]
        for rank, of_rank in enumerate(packs)
    ]


def stuck(steps: Steps) -> tuple[int, ...] | None:
    """The steps that each rank has done in a state from which none can go on, although not all have ended."""
    ends, start = tuple(map(len, steps)), (0,) * len(steps)
    seen, todo = {start}, [start]
    while todo:
        state = todo.pop()
        found = False
        for rank, done in enumerate(state):
            if done < ends[rank] and all(state[of] > at for of, at in steps[rank][done]):
                found = True
                if (after := (*state[:rank], done + 1, *state[rank + 1 :])) not in seen:
                    seen.add(after)
                    todo.append(after)
        if not found and state != ends:
            return state
    return None


class Recorded:
    """In place of a rank's sync, and of its buffers. `done`: its waits, and the flags that it sets, with the ranks."""

    def __init__(self, rank: int, world: int, layers: int, in_flight: int) -> None:
        self.buffers, self.rank, self.world = self, rank, world
        self.layers, self.tokens, self.heap = layers, 99, SimpleNamespace(apart=False)
        self.slots = [layer % in_flight for layer in range(layers)]
        self.shapes = [LayerShape(heads=1, widths=(1, 1), dtype="float32")] * layers
        self.stays = [layer + in_flight >= layers for layer in range(layers)]
        self.done: list[Wait | tuple[OwnFlag, list[int]]] = []

    def begin(self) -> None:
        pass

    def rows(self, layer: int, kind: int, segment: PlannedSegment, start: int, stop: int) -> torch.Tensor:
        return torch.zeros(stop - start, 1, 1)

    gradient_rows = rows

    def signal(self, flag: Flag, ranks: Iterable[int], layer: int, epoch: int) -> None:
        self.done.append(((flag, layer, epoch), list(ranks)))

    def wait(self, wait: Wait) -> None:
        self.done.append(wait)

    def add(self, *_: object) -> None:
        pass


class _Attends(torch.autograd.Function):
    """Reads and adds as attention does."""

    @staticmethod
    def forward(ctx: Any, keys: torch.Tensor, values: torch.Tensor, before: RowsOfOthers | None) -> torch.Tensor:
        ctx.before = before
        for _ in before.each() if before else ():
            pass
        return keys + values

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.before:
            ctx.before.add(ctx.before.each(backward=True), (True, True))
        return gradient, gradient, None


def recorded(
    deal: Deal, layers: int, *, in_order: bool, in_flight: int
) -> list[list[Wait | tuple[OwnFlag, list[int]]]]:
    """What the exchange and autograd do, by rank; with fewer buffers than layers under checkpoints."""
    plan, of_ranks = SplitPlan.of(deal), [Recorded(rank, len(deal), layers, in_flight) for rank in range(len(deal))]
    for sync, packs in zip(of_ranks, deal, strict=True):
        exchange = SequenceExchange(sync, Streams(), grid=None, in_order=in_order)
        exchange.begin(plan)
        for segments in (pack for pack in packs if isinstance(pack[0], Segment)):
            bounds = [0, *itertools.accumulate(map(len, segments))]
            spans = exchange.spans(bounds, segments)
            rows = torch.zeros(1, 1, bounds[-1], 1, requires_grad=True)

            def attend(rows: torch.Tensor, layer: int, exchange=exchange, spans=spans) -> torch.Tensor:
                side, runs = LayerSplit(exchange, layer), exchange.runs(layer, spans, None)
                keys, values = side.publish((rows, 2 * rows), spans)
                before = RowsOfOthers(side, spans, runs, None, (rows.dtype, rows.dtype)) if runs else None
                out = _Attends.apply(keys, values, before)
                return out * out  # what a recomputation is for

            for layer in range(layers):
                rows = (
                    checkpoint(attend, rows, layer, use_reentrant=False) if in_flight < layers else attend(rows, layer)
                )
            rows.sum().backward()
        exchange.leave()
    return [each.done for each in of_ranks]


def steps_of_code(deal: Deal, *, in_order: bool, in_flight: int) -> Steps:
    """As `steps_of`, of each wait, and each flag that is set."""
    calls = []
    for done in recorded(deal, LAYERS, in_order=in_order, in_flight=in_flight):
        named = [
            (False, (each.flag, each.layer, each.epoch), [*each.whom]) if isinstance(each, Wait) else (True, *each)
            for each in done
        ]
        calls.append([(key, [*group]) for key, group in itertools.groupby(named, lambda it: it[:2])])
    sets = {
        (rank, flag, other): step
        for rank, of_rank in enumerate(calls)
        for step, ((is_set, flag), group) in enumerate(of_rank)
        for other in itertools.chain.from_iterable(others for _, _, others in group)
        if is_set
    }
    return [
        [
            sorted({(of, sets[of, flag, rank]) for _, _, others in group for of in others if not is_set})
            for (is_set, flag), group in of_rank
        ]
        for rank, of_rank in enumerate(calls)
    ]


def waves_of(tree: Segments) -> list[Deal]:
    """The tree over the ranks in every way that makes others wait for others, one of each: [rank][0] is a pack."""
    found: dict[object, Deal] = {}
    for ranks in itertools.product(range(RANKS), repeat=len(tree)):
        rank_of = dict(zip(tree, ranks, strict=True))
        waits = frozenset((rank_of[segment], rank_of[of]) for segment in tree for of in reads(tree, segment))
        deal = [[[each for each in tree if rank_of[each] == rank]] for rank in range(RANKS)]
        found.setdefault(frozenset((rank, of) for rank, of in waits if rank != of), deal)
    return [deal for waits, deal in found.items() if waits]


def after(first: Deal, second: Deal) -> Deal:
    """Two trees as two waves, and unsplit samples before, between and after them."""

    def renamed(pack: list[Segment]) -> list[Segment]:
        parents = [None if each.parent is None else 10 + each.parent for each in pack]
        return [replace(each, sample=10 + each.sample, parent=of) for each, of in zip(pack, parents, strict=True)]

    deal = [
        [[20 + rank], one, [30 + rank], renamed(other), [40 + rank]]
        for rank, ((one,), (other,)) in enumerate(zip(first, second, strict=True))
    ]
    return [[pack for pack in packs if pack] for packs in deal]


def in_two_packs(deal: Deal) -> Iterator[Deal]:
    """Without rule 1: a rank's segments of its first wave in two microbatches, either segment first."""
    for rank, packs in enumerate(deal):
        pack = packs[1] if len(packs) > 2 else ()
        for at in range(len(pack)) if len(pack) > 1 else ():
            two = [[pack[at]], [*pack[:at], *pack[at + 1 :]]]
            yield [[*packs[:1], *two, *packs[2:]] if of == rank else other for of, other in enumerate(deal)]


def in_another_order(deal: Deal) -> Iterator[Deal]:
    """Without rule 2: a rank's two waves in the other order, where another rank has both too."""
    both = [rank for rank, packs in enumerate(deal) if len(packs) == 5]
    for rank in both if len(both) > 1 else ():
        yield [packs[::-1] if of == rank else packs for of, packs in enumerate(deal)]


WAVES = {name: waves_of(tree) for name, tree in TREES.items()}
PAIRS = [*zip(WAVES.values(), [*WAVES.values()][1:] + [*WAVES.values()][:1], strict=True)]  # a tree's and the next's
DEALS = [after(wave, second[at % len(second)]) for first, second in PAIRS for at, wave in enumerate(first)]


def test_no_plan_can_stop() -> None:
    for at, deal in enumerate(DEALS):
        plan = SplitPlan.of(deal)
        segments = [each for packs in deal for pack in packs for each in pack if isinstance(each, Segment)]
        for segment in segments:
            assert {each.holder.segment: (each.low, each.high) for each in plan.reads(segment)} == reads(
                segments, segment
            )
        assert plan.waves == 2
        # Every plan in one of two ways. Waits in the order of ranks are more than without.
        assert stuck(steps_of(deal, in_order=at % 2 == 0, in_flight=1 + at % 3 % LAYERS)) is None, deal


@pytest.mark.parametrize(("in_order", "in_flight"), [(False, LAYERS), (True, LAYERS), (False, 1), (True, 1)])
def test_waits_of_the_code(in_order: bool, in_flight: int) -> None:
    """They are no other than the walk has, and end."""
    for deal in DEALS[::8]:
        found, want = (make(deal, in_order=in_order, in_flight=in_flight) for make in (steps_of_code, steps_of))
        assert stuck(found) is None
        for mine, theirs in zip(found, want, strict=True):
            assert [{rank for rank, _ in step} for step in mine if step] == [
                {rank for rank, _ in step} for step in theirs if step
            ], deal


@pytest.mark.parametrize("rule", ["waits_first", "collects_first", "empties_late"])
def test_without_a_rule_in_a_layer_a_plan_stops(rule: str) -> None:
    states = [state for deal in DEALS[::8] if (state := stuck(steps_of(deal, in_flight=1, **{rule: True})))]
    assert len(states) > 1


@pytest.mark.parametrize(
    ("without", "words"),
    [
        (
            in_two_packs,
            r"rank \d has segments of samples .* which are computed together, in two packs: put all of them",
        ),
        (in_another_order, r"ranks compute samples .* in different orders and would wait for each other"),
    ],
)
def test_without_rules_1_and_2_a_plan_stops_and_is_refused(without: Callable, words: str) -> None:
    stopped = 0
    for deal in itertools.chain.from_iterable(map(without, DEALS[::6])):
        with pytest.raises(ValueError, match=words):
            SplitPlan.of(deal)
        stopped += stuck(steps_of(deal)) is not None
    assert stopped > 1
