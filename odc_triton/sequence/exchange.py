"""Pieces of samples in a minibatch, on one rank: attention publishes, reads, adds and collects.

Per layer, for the pieces of one microbatch (see [Note: waves] in balance/pieces.py):

forward     publish  writes keys and values of the own pieces that others read, and says so
            fetch    waits for those before them on other ranks, and reads them
backward    fetch    adds the gradients of what was read to the ranks that hold it, and says so
            publish  waits for the additions of other ranks' pieces, and takes them

Publish passes keys and values through and fetch takes them as its anchor, so autograd runs fetch's backward first:
everything is added to others before this rank waits for what they add.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial

import torch

from ..balance.pieces import Piece, PlannedPiece, Read, SplitPlan
from ..base.errors import RanksDiffer
from ..comm.grid import Grid
from ..engine.participant import Participant
from ..engine.transport import Streams
from .buffers import KEYS, VALUES, Flag
from .fetched import Fetched, Rows
from .sync import HostSync, Wait
from .tree import RemoteRows, runs_of, within


@dataclass(frozen=True, slots=True)
class Span:
    """A piece, and which rows of the pack it is."""

    piece: Piece
    first: int
    end: int


class PieceState(Enum):
    """Of a piece in a layer."""

    PENDING = 0  # its forward has not run
    FORWARD = 1  # its forward ran, and nothing follows
    NO_GRAD = 2  # its forward ran without gradients: perhaps a checkpoint, whose backward runs it again
    BACKWARD = 3  # its backward must follow
    DONE = 4  # its backward ran


class SequenceExchange(Participant):
    """Pieces of sequences in the minibatch protocol. `plan`: of the open minibatch, this replica's part; None while
    nothing is split there.

    `tokens`: of each rank, the most tokens that others may read.
    """

    name = "split"

    def __init__(self, sync: HostSync, streams: Streams, *, grid: Grid, in_order: bool, debug: bool = False) -> None:
        """`streams`: its own, to copy and to add beside what the engine copies and adds. `in_order`: ranks add to a
        piece in their order, so that its gradients have the same bits in every run. `debug`: asserts
        [Note: forward progress].
        """
        self._grid = grid
        self.sync, self.streams, self.buffers = sync, streams, sync.buffers
        self.rank, self.world, self.tokens = self.buffers.rank, self.buffers.world, self.buffers.tokens
        self.is_apart, self._in_order, self._debug = self.buffers.heap.apart, in_order, debug
        self._waited: set[tuple[Flag, int, int]] = set()  # flags, layers and epochs that this rank has waited for
        self.plan: SplitPlan | None = None
        self._next: SplitPlan | None = None  # once all ranks have entered
        self._own: list[PlannedPiece] = []
        self._epochs = 0  # used up by former plans: one per wave
        self._states: dict[Piece, list[PieceState]] = {}  # of own pieces, by layer
        self.released: list[list[Fetched]] = []  # of each layer whose backward must fetch again
        self._must_clear = False
        self._forward_only = False

    # ------------------------------------------------------------------ the minibatch

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
        most = max(given.tokens)
        if most > self.tokens:
            raise ValueError(
                f"the plan lets others read {most} tokens of rank {given.tokens.index(most)}, and there is room for "
                f"{self.tokens}: give enable_split(model, tokens={most}), or the sampler split={self.tokens}"
            )
        self._next = given.of_replica(self._grid.replica)
        return given.digest

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
        self.plan, self._forward_only = plan, forward_only
        self._own = [] if plan is None else plan.of_rank(self.rank)
        self._states = {planned.piece: [PieceState.PENDING] * self.buffers.layers for planned in self._own}
        self.released.clear()
        self._waited.clear()
        if plan is not None:
            self.sync.begin()

    def failed(self) -> None:
        """Ends the waits of ranks that need this one's pieces, also of a plan that only they have yet."""
        self.sync.fail()

    def leave(self) -> None:
        """Raises RuntimeError if pieces of the plan are missing on this rank."""
        if self.plan is not None and (missing := self._missing_before(self.plan.waves)) is not None:
            raise RuntimeError(missing)

    def _missing_before(self, wave: int) -> str | None:
        for planned in self._own:
            if planned.wave >= wave:
                continue
            states = self._states[planned.piece]
            if PieceState.PENDING in states:
                return (
                    f"{planned.piece} were not computed, and other ranks need them: run every pack of the minibatch, "
                    f"in their order"
                )
            layers = [layer for layer, state in enumerate(states) if state is PieceState.BACKWARD]
            if layers or (PieceState.NO_GRAD in states and PieceState.DONE not in states):
                where = f" in layers {layers}" if 0 < len(layers) < self.buffers.layers else ""
                return (
                    f"{planned.piece} had no backward{where}, and other ranks wait for it: call backward for each pack "
                    f"before the next one's forward, on a loss that depends on all layers, also for a pack without "
                    f"targets (0 * logits.sum() does)"
                )
        return None

    def settle(self, messages: list[None] | None) -> None:
        self.end(failed=messages is None)

    def end(self, *, failed: bool) -> None:
        """Every rank has left."""
        if self.plan is not None:
            self.sync.end()
            self._epochs += self.plan.waves
            self._must_clear = failed
        self.plan = None

    # ------------------------------------------------------------------ what layers do

    def _epoch(self, spans: Sequence[Span]) -> int:
        """Of the pieces of one microbatch, which are of one wave."""
        return self._epochs + self._planned(spans[0].piece).wave + 1

    def spans(self, bounds: Sequence[int], pieces: Sequence[Piece | None]) -> list[Span]:
        """The pack's pieces that are in the plan. Raises RuntimeError for pieces that need others and are not."""
        if len(bounds) - 1 != len(pieces):
            raise RuntimeError(
                f"the pack has {len(bounds) - 1} documents, but says for {len(pieces)} which pieces they are"
            )
        spans = [
            Span(piece, first, end)
            for piece, first, end in zip(pieces, bounds[:-1], bounds[1:], strict=True)
            if piece is not None and self.plan is not None and self.plan.find(piece) is not None
        ]
        for span in spans:
            self._planned(span.piece)
        return spans

    def _check_order(self, spans: list[Span]) -> None:
        """Rules 1 and 2 of [Note: waves]."""
        wave, here = self._planned(spans[0].piece).wave, {span.piece for span in spans}
        if (missing := self._missing_before(wave)) is not None:
            raise RuntimeError(missing)
        for planned in self._own:
            if (planned.wave == wave) != (planned.piece in here):
                raise RuntimeError(
                    f"{planned.piece} and {spans[0].piece} are not in the packs that the plan has them in"
                )

    def _planned(self, piece: Piece) -> PlannedPiece:
        planned = self.plan.find(piece)
        if planned is None or planned.rank != self.rank:
            raise RuntimeError(
                f"{piece} are not this rank's in the minibatch's plan: give minibatch() the split of the packs that it "
                f"runs"
            )
        return planned

    def reads(self, piece: Piece, window: int | None) -> list[Read]:
        """What a piece reads. `window`: the tokens that a query sees, itself included."""
        return within(window, piece, self.plan.reads(piece))

    def readers(self, piece: Piece, window: int | None) -> list[PlannedPiece]:
        """The pieces of other ranks that read `piece`."""
        others = [each for each in self.plan.readers(piece) if each.rank != self.rank]
        if window is None:
            return others
        return [each for each in others if any(read.holder.piece == piece for read in self.reads(each.piece, window))]

    def runs(self, spans: Iterable[Span], window: int | None) -> list[RemoteRows]:
        """All that these pieces read of other ranks."""
        return runs_of((read for span in spans for read in self.reads(span.piece, window)), self.rank)

    def start(self, layer: int, spans: list[Span], *, trains: bool) -> None:
        """The forward of these pieces in that layer; `trains`: their keys or values need gradients.

        Raises RuntimeError where other ranks would wait for ever, or read what changes under them.
        """
        for span in spans:
            if self._states[span.piece][layer] is not PieceState.PENDING:
                raise RuntimeError(
                    f"{span.piece} were computed before, and other ranks may have read them: run a pack with pieces "
                    f"once in a minibatch; forwards without gradients go before or after it, into split_forward"
                )
        if layer == 0:
            self._check_order(spans)
        if self._forward_only or (torch.is_grad_enabled() and not trains):
            state = PieceState.FORWARD
        else:
            state = PieceState.BACKWARD if torch.is_grad_enabled() else PieceState.NO_GRAD
        for span in spans:
            self._states[span.piece][layer] = state

    def _require_first(self, layer: int, spans: list[Span]) -> None:
        """Other ranks wait for one addition: a later one would be lost, or stay for the next minibatch."""
        for span in spans:
            if self._states[span.piece][layer] is PieceState.DONE:
                raise RuntimeError(
                    f"{span.piece} had a backward already, and other ranks have taken their gradients from it: call "
                    f"backward once for a pack with pieces, on the sum of its losses"
                )

    def publish(self, layer: int, spans: list[Span], window: int | None, rows: Rows) -> None:
        """`rows`: keys and values [T, heads, D] of the pack."""
        whom: set[int] = set()
        for span in spans:
            planned = self._planned(span.piece)
            for kind, each in enumerate(rows):
                place = self.buffers.rows(layer, kind, planned, span.piece.start, span.piece.start + planned.read)
                place.copy_(each[span.first : span.first + planned.read])
            whom |= {reader.rank for reader in self.readers(span.piece, window)}
        self._tells(Flag.PUBLISHED, layer, spans)
        self.sync.signal(Flag.PUBLISHED, whom, layer, self._epoch(spans))

    def read(self, layer: int, spans: list[Span], run: RemoteRows, dtypes: Sequence[torch.dtype]) -> Rows | Fetched:
        """Keys and values [tokens, heads, D] of `run`, which `spans` read, as views where buffers are joined, else as
        copies, which have begun.
        """
        whom = {each.rank: f"keys and values of {each.piece} in layer {layer}" for each in reversed(run.holders)}
        wait = self._wait_for(Flag.PUBLISHED, layer, spans, whom)
        self.streams.go_on()
        if not self.is_apart:
            wait()
            return tuple(self.buffers.rows(layer, kind, run.holders[0], run.low, run.high) for kind in (KEYS, VALUES))
        held = [
            tuple(self.buffers.rows(layer, kind, each, *self._bounds(run, each)) for kind in (KEYS, VALUES))
            for each in run.holders
        ]
        fetched = Fetched(held, dtypes, self.streams)
        fetched.start(wait)
        return fetched

    def _bounds(self, run: RemoteRows, holder: PlannedPiece) -> tuple[int, int]:
        """The tokens of `run` that `holder` computes."""
        return max(run.low, holder.piece.start), min(run.high, holder.piece.stop)

    def fetch_ahead(self, done: list[Fetched]) -> None:
        """Starts copying what the backward needs next, after that of `done`'s layer: that of the layer before."""
        while self.released and self.released.pop() is not done:
            pass
        for each in self.released[-1] if self.released else ():
            each.start()

    def _wait_for(
        self, flag: Flag, layer: int, spans: Sequence[Span], whom: dict[int, str], *, is_own_set: bool = True
    ) -> Callable[[], None]:
        """A function that waits for other ranks; `whom`: by rank, the purpose."""
        epoch = self._epoch(spans)
        if whom:
            self._waited.add((flag, layer, epoch))
        wait = Wait(flag=flag, layer=layer, epoch=epoch, whom=whom, is_own_set=is_own_set)
        return partial(self.sync.wait, wait) if whom else lambda: None

    def _tells(self, flag: Flag, layer: int, spans: Sequence[Span]) -> None:
        if self._debug and (flag, layer, self._epoch(spans)) in self._waited:
            raise AssertionError(
                f"{spans[0].piece}: this rank has waited for {flag.name} flags of layer {layer} before it set its own, "
                f"so ranks may wait in a circle: see [Note: forward progress]"
            )

    def add(
        self,
        layer: int,
        spans: list[Span],
        runs: Sequence[RemoteRows],
        window: int | None,
        gradients: Sequence[torch.Tensor | None],
    ) -> None:
        """Adds gradients of what was read. `gradients`: two for each run, [tokens, heads, D], contiguous, or None."""
        self._require_first(layer, spans)
        self._tells(Flag.ADDED, layer, spans)
        beside = self._beside(layer, runs, window) if self._in_order else {}
        if before := {rank: purpose for rank, purpose in beside.items() if rank < self.rank}:
            self.streams.after_adds(self._wait_for(Flag.ADDED, layer, spans, before, is_own_set=False))
        shown = Wait(flag=Flag.ADDED, layer=layer, epoch=self._epoch(spans), whom={}, is_own_set=False)
        for at, run in enumerate(runs):
            for kind in (KEYS, VALUES):
                if (rows := gradients[2 * at + kind]) is not None:
                    self.streams.add(rows, partial(self._add, shown, kind, run))
        owners = {holder.rank for run in runs for holder in run.holders}
        whom = owners | {rank for rank in beside if rank > self.rank}
        self.streams.after_adds(partial(self.sync.signal, Flag.ADDED, whom, layer, self._epoch(spans)))

    def _beside(self, layer: int, runs: Sequence[RemoteRows], window: int | None) -> dict[int, str]:
        """The other ranks that add to what this one reads, and what they do."""
        found: dict[int, str] = {}
        for holder in (holder for run in runs for holder in run.holders):
            for reader in self.plan.readers(holder.piece):
                if reader.rank not in (self.rank, holder.rank) and any(
                    read.holder is holder for read in self.reads(reader.piece, window)
                ):
                    found[reader.rank] = f"gradients of {holder.piece} from {reader.piece} in layer {layer}"
        return found

    def _add(self, shown: Wait, kind: int, run: RemoteRows, rows: torch.Tensor) -> None:
        for holder in run.holders:
            low, high = self._bounds(run, holder)
            place = self.buffers.gradient_rows(shown.layer, kind, holder, low, high)
            purpose = f"gradients of {holder.piece} in layer {shown.layer}"
            self.sync.add(shown, holder.rank, place, rows[low - run.low : high - run.low], purpose)

    def collect(
        self, layer: int, spans: list[Span], window: int | None, gradients: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """The gradients of the pack's keys and values, [T, heads, D] or None, with what others have added."""
        self._require_first(layer, spans)
        readers_of = [self.readers(span.piece, window) for span in spans]
        if any(readers_of):
            gradients = [None if each is None else each.clone() for each in gradients]
        self.streams.go_on()
        for span, readers in zip(spans, readers_of, strict=True):
            self._states[span.piece][layer] = PieceState.DONE
            if not readers:
                continue
            whom = {
                each.rank: f"gradients of {span.piece} from {each.piece} in layer {layer}" for each in reversed(readers)
            }
            self._wait_for(Flag.ADDED, layer, spans, whom)()
            planned = self._planned(span.piece)
            for kind, whole in enumerate(gradients):
                stop = span.piece.start + planned.read
                place = self.buffers.gradient_rows(layer, kind, planned, span.piece.start, stop)
                if whole is not None:
                    own = whole[span.first : span.first + planned.read]
                    own.copy_(own.to(place.dtype) + place)
                place.zero_()
        return list(gradients)
