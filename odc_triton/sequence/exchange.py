"""Segments of samples in a minibatch, on one rank: attention publishes, reads, adds and collects.

Per layer, for the segments of one microbatch (see [Note: waves] in plan/segments.py):

forward     publish  writes keys and values of this rank's segments that others read, and says so
            read     waits for those before them on other ranks, and reads them
backward    read     reads them again
            add      adds their gradients to the ranks that hold them, and says so
            collect  waits for the additions of other ranks' segments, and takes them

[Note: reused buffers] Where buffers serve several layers, a layer's rows are written again in its recomputation. Before
a buffer is written in a forward, this rank waits until others have read the layer that has it. In a backward it need
not: it has collected that layer's gradients, and a rank adds them after it has read the rows. Rows of gradients are
safe too: a rank adds to them after it has read that layer's keys and values, and their owner publishes these after it
has taken the gradients of the layer before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ..base.errors import RanksDiffer
from ..comm.grid import Grid
from ..engine.minibatch import Participant
from ..engine.transport import Streams
from ..engine.unit import in_backward_pass
from ..plan.cuts import CutPlan, cuts_of, most_cuts
from ..plan.entries import Segment
from ..plan.segments import PlannedReads, PlannedSegment, Read, SplitPlan, within
from .buffers import RUN_TOKENS, Flag
from .fetched import Fetched, Rows, SharedRows
from .progress import PlanProgress
from .sync import HostSync, OwnFlag, Wait
from .tree import runs_of


@dataclass(frozen=True, slots=True)
class Span:
    """A segment, and which rows of the pack it is."""

    segment: Segment
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class _InBuffer:
    """What a buffer has: rows of `layer`, written in the pass of `epoch`. `whom`: by rank, what it reads them for."""

    layer: int
    epoch: int
    spans: list[Span]
    whom: dict[int, str]


class SequenceExchange(Participant):
    """Segments of sequences in the minibatch protocol. `plan`: of the open minibatch, this replica's part; None while
    nothing is split there.

    `tokens`: of each rank, the most tokens that others may read.
    """

    name = "split"
    needs_all_ranks = True

    run_tokens = RUN_TOKENS

    def __init__(
        self, sync: HostSync, streams: Streams, *, grid: Grid, in_order: bool, numbers: Sequence[int] | None = None
    ) -> None:
        """`streams`: its own, so that copies and additions overlap the engine's. `in_order`: ranks add to a
        segment in their order, so that its gradients have the same bits in every run. `numbers`: of the layers, in the
        model.
        """
        self._grid = grid
        self.sync, self.streams, self.buffers = sync, streams, sync.buffers
        self.rank, self.tokens = self.buffers.rank, self.buffers.tokens
        self.is_apart, self.in_order = self.buffers.heap.apart, in_order
        self.numbers = range(self.buffers.layers) if numbers is None else numbers
        self.plan: SplitPlan | None = None
        self._next: SplitPlan | None = None  # once all ranks have entered
        self._epochs = 0  # used up by former plans: two per wave
        # The most cuts of a rank; None: any, as no layer recurs.
        self.split_cuts = self.buffers.cuts if any(shape.rows_per_cut for shape in self.buffers.shapes) else None
        self._plans: list[PlannedReads] = []  # by layer
        self.cuts: dict[Segment, tuple[int, ...]] = {}  # of the plan
        self._progress = PlanProgress((), self.numbers)
        self._written: dict[int, _InBuffer] = {}  # by buffer, in this plan
        self._must_clear = False

    def entry(self, given: SplitPlan | None) -> str | None:
        """Clears what a minibatch that failed has left; returns the plan's digest. Raises ValueError, TypeError for a
        plan that does not fit, RuntimeError while another is open.
        """
        self._next = None
        if self.plan is not None:  # its epochs would be used twice
            raise RuntimeError("this is inside split_forward: leave it before a minibatch, or another split_forward")
        if self._must_clear:
            self.buffers.clear_own_gradients()
            self._must_clear = False
        if given is None:
            return None
        if not isinstance(given, SplitPlan):
            raise TypeError(f"split is a {type(given).__name__}; give the packs' plan, packs.split")
        if given.ranks != self._grid.world:
            raise ValueError(
                f"the plan is of {given.ranks} ranks; make it for the {self._grid.world} ranks of this model"
            )
        if given.replicas != self._grid.replicas:
            raise ValueError(
                f"the plan is for replicas={given.replicas}; the model has {self._grid.replicas}: give that number to "
                f"MinibatchSampler(replicas=…), or to SplitPlan.of"
            )
        self._require_room(given)
        self._next = given.of_replica(self._grid.replica)
        return given.digest

    def _require_room(self, plan: SplitPlan) -> None:
        most = max(plan.tokens)
        if most > self.tokens:
            raise ValueError(
                f"the plan lets others read {most} tokens of rank {plan.tokens.index(most)}, and there is room for "
                f"{self.tokens}: give enable_split(model, tokens={most}), or the sampler split={self.tokens}"
            )
        cuts, rank = (0, 0) if self.split_cuts is None else most_cuts(plan)
        if self.split_cuts is not None and cuts > self.split_cuts:
            raise ValueError(
                f"other ranks go on from rank {rank} at {cuts} places of the plan, and there is room for the states of "
                f"{self.split_cuts}: give enable_split(model, tokens=…, cuts={cuts}), or the sampler "
                f"split_cuts={self.split_cuts}"
            )

    def entered(self, messages: list[str | None]) -> None:
        if len(set(messages)) > 1:
            by_rank = ", ".join(f"{digest or 'none'} on rank {rank}" for rank, digest in enumerate(messages))
            raise RanksDiffer(
                f"the ranks split sequences by {len(set(messages))} different plans ({by_rank}): give all ranks' "
                f"minibatch() the split of one sampler, with the same data, seed, cost and limits"
            )

    def opened(self, *, forward_only: bool = False) -> None:
        self.begin(self._next, forward_only=forward_only)

    def begin(self, plan: SplitPlan | None, *, forward_only: bool = False) -> None:
        self.plan = None
        if plan is None:
            return
        self._require_room(plan)  # a reference model has its own buffers
        self.plan = plan
        self._progress = PlanProgress(plan.of_rank(self.rank), self.numbers, forward_only=forward_only)
        self.cuts = {} if self.split_cuts is None else cuts_of(plan)
        kinds = [(shape.rows_per_cut, shape.states) for shape in self.buffers.shapes]
        at_cuts = {kind: CutPlan(plan, kind[0], states=kind[1]) for kind in kinds if kind[0]}
        self._plans = [at_cuts.get(kind, plan) for kind in kinds]
        self._written.clear()
        self.sync.begin()

    def failed(self) -> None:
        """Ends the waits of ranks that need this one's segments, also of a plan that only they have yet."""
        self.sync.fail()

    def leave(self) -> None:
        """Raises RuntimeError if segments of the plan are missing on this rank."""
        if self.plan is not None:
            self._progress.require_before(self.plan.waves)

    def settle(self, messages: list[None] | None) -> None:
        self.end(failed=messages is None)

    def end(self, *, failed: bool) -> None:
        """Every rank has left."""
        if self.plan is not None:
            self.sync.end()
            self._epochs += 2 * self.plan.waves
            self._must_clear = failed
        self.plan = None

    def _epoch(self, spans: Sequence[Span], *, backward: bool) -> int:
        """Of a pass of the segments of one microbatch, which are of one wave: odd for a forward."""
        return self._epochs + 2 * self._planned(spans[0].segment).wave + 1 + backward

    def spans(self, bounds: Sequence[int], segments: Sequence[Segment | None]) -> list[Span]:
        """The pack's segments that are in the plan. Raises RuntimeError for segments that need others and are not."""
        if len(bounds) - 1 != len(segments):
            raise RuntimeError(
                f"the pack has {len(bounds) - 1} documents, but says for {len(segments)} which segments they are"
            )
        spans = [
            Span(segment, first, end)
            for segment, first, end in zip(segments, bounds[:-1], bounds[1:], strict=True)
            if segment is not None and self.plan is not None and self.plan.find(segment) is not None
        ]
        for span in spans:
            self._planned(span.segment)
        return spans

    def _rows(self, layer: int) -> str:
        shape = self.buffers.shapes[layer]
        return "states" if shape.states else "rows" if shape.rows_per_cut else "keys and values"

    def gradients(self, layer: int, segment: Segment, reader: Segment | None = None) -> str:
        """Their name in messages."""
        of = f"{self._rows(layer)} of " if self.buffers.shapes[layer].rows_per_cut else ""
        return f"gradients of {of}{segment}{f' from {reader}' if reader else ''} in layer {self.numbers[layer]}"

    def of(self, layer: int) -> PlannedReads:
        """The plan of a layer's rows."""
        assert self.plan is not None, "there are segments, and no plan"
        return self._plans[layer]

    def _planned(self, segment: Segment, layer: int = 0) -> PlannedSegment:
        planned = self.of(layer).find(segment)
        if planned is None or planned.rank != self.rank:
            raise RuntimeError(
                f"{segment} are not this rank's in the minibatch's plan: give minibatch() the split of the packs that "
                f"it runs"
            )
        return planned

    def reads(self, layer: int, segment: Segment, window: int | None) -> list[Read]:
        """What a segment reads. `window`: the tokens that a query sees, itself included."""
        return within(window, segment, self.of(layer).reads(segment))

    def readers(self, layer: int, segment: Segment, window: int | None) -> list[PlannedSegment]:
        """The segments of other ranks that read `segment`."""
        others = [each for each in self.of(layer).readers(segment) if each.rank != self.rank]
        if window is None:
            return others
        reads = {each: self.reads(layer, each.segment, window) for each in others}
        return [each for each in others if any(read.holder.segment == segment for read in reads[each])]

    def runs(self, layer: int, spans: Iterable[Span], window: int | None) -> list[Read]:
        """All that these segments read of other ranks."""
        reads = (read for span in spans for read in self.reads(layer, span.segment, window))
        # A cut has few rows.
        return runs_of(reads, self.rank, RUN_TOKENS if self.buffers.shapes[layer].rows_per_cut else self.run_tokens)

    def start(self, layer: int, spans: list[Span], *, trains: bool) -> None:
        """See `PlanProgress.start`."""
        segments = [span.segment for span in spans]
        self._progress.start(layer, segments, self._planned(segments[0]).wave, trains=trains)

    def publish(self, layer: int, spans: list[Span], window: int | None, rows: Rows, *, again: bool = False) -> None:
        """`rows`: keys and values [T, heads, D] of the pack. `again`: in a recomputation; see [Note: reused buffers].

        Raises RuntimeError if a layer would lose its rows before its backward.
        """
        if again and self.buffers.stays[layer]:
            return
        epoch = self._epoch(spans, backward=again)
        readers = [each for span in spans for each in reversed(self.readers(layer, span.segment, window))]
        whom = {
            each.rank: f"{each.segment} to read {self._rows(layer)} of layer {self.numbers[layer]}" for each in readers
        }
        self._empty(layer, epoch)
        self._written[self.buffers.slots[layer]] = _InBuffer(layer, epoch, spans, whom)
        for span in spans:
            planned = self._planned(span.segment, layer)
            for kind, each in enumerate(rows):
                place = self.buffers.rows(layer, kind, planned, span.segment.start, span.segment.start + planned.read)
                place.copy_(each[span.first : span.first + planned.read])
        self.sync.signal(Flag.PUBLISHED, whom, layer, epoch)

    def _empty(self, layer: int, epoch: int) -> None:
        """Waits until the buffer of `layer` can be written."""
        former = self._written.get(self.buffers.slots[layer])
        if former is None or (former.epoch - 1) // 2 != (epoch - 1) // 2:  # other waves have other rows
            return
        if epoch % 2:
            doing = (Flag.PUBLISHED, layer, epoch)
            self.streams.go_on()
            self._wait_for(Flag.READ, former.layer, former.epoch, former.whom, sets_next=doing)()
        elif not all(self._progress.is_done(former.layer, span.segment) for span in former.spans):
            raise RuntimeError(
                f"layer {self.numbers[layer]} is computed again before the backward of layer "
                f"{self.numbers[former.layer]}, whose keys and values "
                f"are in the same buffer: call enable_split(model, tokens=…, layers_in_flight=…) with the number of "
                f"layers that one checkpoint computes again, or more"
            )

    def require_written(self, layer: int, spans: list[Span]) -> None:
        """In a backward. Raises RuntimeError if the buffer has another layer's rows."""
        written, epoch = self._written[self.buffers.slots[layer]], self._epoch(spans, backward=True)
        if not self.buffers.stays[layer] and (written.layer, written.epoch) != (layer, epoch):
            raise RuntimeError(
                f"layer {self.numbers[layer]} was not computed again in the backward of {spans[0].segment}, and its "
                f"keys and values are gone: checkpoint every layer that attends, or call enable_split(model, tokens=…, "
                f"layers_in_flight={len({*self.numbers})})"
            )

    def read(
        self, layer: int, spans: list[Span], run: Read, dtypes: Sequence[torch.dtype], *, backward: bool = False
    ) -> Fetched:
        """Keys and values [tokens, heads, D] of `run`, which `spans` read. In a backward they are known to be there."""
        held = tuple(self.buffers.rows(layer, kind, *run) for kind in range(len(dtypes)))
        kind = Fetched if self.is_apart else SharedRows
        if backward:
            return kind(held, dtypes, self.streams)
        epoch = self._epoch(spans, backward=in_backward_pass() and not self.buffers.stays[layer])
        whom = {run.holder.rank: f"{self._rows(layer)} of {run.holder.segment} in layer {self.numbers[layer]}"}
        return kind(held, dtypes, self.streams, self._wait_for(Flag.PUBLISHED, layer, epoch, whom))

    def have_read(self, layer: int, spans: list[Span], runs: Sequence[Read]) -> None:
        """After a forward's attention."""
        if not self.buffers.stays[layer]:
            epoch = self._epoch(spans, backward=False)
            self.sync.signal(Flag.READ, {run.holder.rank for run in runs}, layer, epoch)

    def _wait_for(
        self, flag: Flag, layer: int, epoch: int, whom: dict[int, str], *, sets_next: OwnFlag | None = None
    ) -> Callable[[], None]:
        """A function that waits for other ranks; `whom`: by rank, the purpose; `sets_next`: see `Wait`."""
        wait = Wait(flag=flag, layer=layer, epoch=epoch, whom=whom, sets_next=sets_next)
        return partial(self.sync.wait, wait) if whom else lambda: None

    def begin_adding(self, layer: int, spans: list[Span], runs: Sequence[Read], window: int | None) -> Additions:
        """What adds the gradients of `runs`."""
        self._progress.require_first(layer, [span.segment for span in spans])
        epoch = self._epoch(spans, backward=True)
        doing = (Flag.ADDED, layer, epoch)
        beside = self._beside(layer, runs, window) if self.in_order else {}
        if before := {rank: purpose for rank, purpose in beside.items() if rank < self.rank}:
            self.streams.after_adds(self._wait_for(*doing, before, sets_next=doing))
        whom = {run.holder.rank for run in runs} | {rank for rank in beside if rank > self.rank}
        return Additions(self, Wait(flag=Flag.ADDED, layer=layer, epoch=epoch, whom={}, sets_next=doing), whom)

    def _beside(self, layer: int, runs: Sequence[Read], window: int | None) -> dict[int, str]:
        """The other ranks that add to what this one reads, and what they do."""
        found: dict[int, str] = {}
        for holder in dict.fromkeys(run.holder for run in runs):
            for reader in self.of(layer).readers(holder.segment):
                if reader.rank not in (self.rank, holder.rank) and any(
                    read.holder == holder for read in self.reads(layer, reader.segment, window)
                ):
                    found[reader.rank] = self.gradients(layer, holder.segment, reader.segment)
        return found

    def collect(
        self, layer: int, spans: list[Span], window: int | None, gradients: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """The gradients of the pack's keys and values, [T, heads, D] or None, with what others have added."""
        self._progress.require_first(layer, [span.segment for span in spans])
        self.require_written(layer, spans)
        readers_of = [self.readers(layer, span.segment, window) for span in spans]
        if any(readers_of):
            gradients = [None if each is None else each.clone() for each in gradients]
        self.streams.go_on()
        for span, readers in zip(spans, readers_of, strict=True):
            self._progress.end(layer, span.segment)
            if not readers:
                continue
            whom = {each.rank: self.gradients(layer, span.segment, each.segment) for each in reversed(readers)}
            self._wait_for(Flag.ADDED, layer, self._epoch(spans, backward=True), whom)()
            planned = self._planned(span.segment, layer)
            for kind, whole in enumerate(gradients):
                stop = span.segment.start + planned.read
                place = self.buffers.gradient_rows(layer, kind, planned, span.segment.start, stop)
                if whole is not None:
                    own = whole[span.first : span.first + planned.read]
                    own.copy_(own.to(place.dtype) + place)
                place.zero_()
        return list(gradients)


class Additions:
    """Of one layer's backward, of gradients to other ranks. `shown`: to peers, while another rank holds a lock; `whom`:
    the ranks that wait for the end.
    """

    def __init__(self, exchange: SequenceExchange, shown: Wait, whom: set[int]) -> None:
        self._exchange, self._shown, self._whom = exchange, shown, whom

    def add(self, run: Read, gradients: Sequence[torch.Tensor | None]) -> None:
        """Of the run's keys and values, [tokens, heads, D]; None if there is none."""
        for kind, rows in enumerate(gradients):
            if rows is not None:
                self._exchange.streams.add(rows.contiguous(), partial(self._add, run, kind))

    def _add(self, run: Read, kind: int, rows: torch.Tensor) -> None:
        place = self._exchange.buffers.gradient_rows(self._shown.layer, kind, *run)
        purpose = self._exchange.gradients(self._shown.layer, run.holder.segment)
        self._exchange.sync.add(self._shown, run.holder.rank, place, rows, purpose)

    def end(self) -> None:
        exchange, shown = self._exchange, self._shown
        exchange.streams.after_adds(partial(exchange.sync.signal, Flag.ADDED, self._whom, shown.layer, shown.epoch))
