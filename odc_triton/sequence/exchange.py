"""One minibatch's split sequences on one rank: what attention publishes, reads, adds and collects.

Per layer, for the pieces of one microbatch (see [Note: waves] in balance/pieces.py):

forward     publish  writes keys and values of the own pieces that others read, and says so
            fetch    waits for the earlier pieces' and reads them
backward    fetch    adds the gradients of what was read to the ranks that hold it, and says so
            publish  waits for the later pieces' additions and takes them

Publish passes keys and values through and fetch takes them as its anchor, so autograd runs fetch's backward first:
everything is added to others before this rank waits for what they add.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..balance.pieces import Piece, PlannedPiece, SplitPlan, SplitSequence
from ..base.errors import DeadlineExceeded, PeerFailed
from ..comm.meeting import Meetings
from ..engine.passes import in_backward_pass
from ..engine.state import MinibatchState, NoSplits
from .room import KEYS, VALUES, Room

_NAP_S = 20e-6
_SHORT_S = 0.01  # most waits end within it: the ranks of a wave compute the same layer


@dataclass(frozen=True, slots=True)
class Span:
    """A piece, and which rows of the pack it is."""

    piece: Piece
    first: int
    end: int


class SequenceExchange(NoSplits):
    """What `enable_split` puts on an engine. `plan`: of the minibatch that is open; None while nothing is split."""

    def __init__(self, state: MinibatchState, meetings: Meetings, room: Room, *, layers: int) -> None:
        self._state, self._meetings, self.room, self._layers = state, meetings, room, layers
        self.rank, self.world, self.tokens = room.rank, room.world, room.tokens
        self.plan: SplitPlan | None = None
        self._own: list[PlannedPiece] = []
        self._number = 0  # of the plan, from 1
        self._epochs = 0  # used up by former plans: one per wave
        self._attended: set[tuple[Piece, int]] = set()  # pieces and layers whose forward ran
        self._to_return: set[tuple[Piece, int]] = set()  # those whose backward must still come
        self._may_return: set[Piece] = set()  # pieces whose forward had no gradients: checkpoints, perhaps
        self._returned: set[tuple[Piece, int]] = set()  # those whose backward ran
        self._must_clear = False
        self._forward_only = False

    # ------------------------------------------------------------------ the minibatch

    def check(self, plan: SplitPlan | None) -> None:
        """Clears what a minibatch that failed has left. Raises ValueError, TypeError for a plan that does not fit,
        RuntimeError while another is open.
        """
        if self.plan is not None:  # its epochs would be used twice
            raise RuntimeError("this is inside split_forward: leave it before a minibatch, or another split_forward")
        if self._must_clear:
            self.room.clear_own_gradients()
            self._must_clear = False
        if plan is None:
            return
        if not isinstance(plan, SplitPlan):
            raise TypeError(f"split is a {type(plan).__name__}; give the packs' plan, packs.split")
        if plan.ranks != self.world:
            raise ValueError(f"the plan is of {plan.ranks} ranks; make it for the {self.world} ranks of this model")
        most = max(plan.tokens)
        if most > self.room.tokens:
            raise ValueError(
                f"the plan lets others read {most} tokens of rank {plan.tokens.index(most)}, and there is room for "
                f"{self.room.tokens}: give enable_split(model, tokens={most}), or the sampler split={self.room.tokens}"
            )

    def begin(self, plan: SplitPlan | None, *, forward_only: bool = False) -> None:
        self.plan, self._forward_only = plan, forward_only
        self._own = [] if plan is None else plan.of_rank(self.rank)
        self._attended.clear()
        self._to_return.clear()
        self._may_return.clear()
        self._returned.clear()
        if plan is not None:
            self._number += 1

    def fail(self) -> None:
        """Ends the waits of ranks that need this one's pieces."""
        if self.plan is not None:
            self.room.failed[self.rank][0] = self._number

    def incomplete(self) -> str | None:
        """What is missing of the plan's pieces on this rank."""
        return None if self.plan is None else self._missing_before(self.plan.waves)

    def _missing_before(self, wave: int) -> str | None:
        for planned in self._own:
            if self.plan.wave_of(planned.piece) >= wave:
                continue
            if any((planned.piece, layer) not in self._attended for layer in range(self._layers)):
                return (
                    f"{planned.piece} were not computed, and other ranks need them: run every pack of the minibatch, "
                    f"in their order"
                )
            layers = [layer for layer in range(self._layers) if (planned.piece, layer) in self._to_return]
            if layers or planned.piece in self._may_return:
                where = f" in layers {layers}" if 0 < len(layers) < self._layers else ""
                return (
                    f"{planned.piece} had no backward{where}, and other ranks wait for it: call backward for each pack "
                    f"before the next one's forward, on a loss that depends on all layers, also for a pack without "
                    f"targets (0 * logits.sum() does)"
                )
        return None

    def end(self, *, failed: bool) -> None:
        """The ranks have met at the exit."""
        if self.plan is not None:
            self._epochs += self.plan.waves
            self._must_clear = failed
        self.plan = None

    # ------------------------------------------------------------------ waiting

    def _epoch(self, piece: Piece) -> int:
        return self._epochs + self.plan.wave_of(piece) + 1

    def _wait(self, purpose: str, rank: int, flags: torch.Tensor, layer: int, piece: Piece) -> None:
        """Until `rank` has shown, in `flags`, that it has done `piece`'s wave in that layer."""
        epoch = self._epoch(piece)
        if int(flags[layer]) >= epoch:
            return
        with self._state.events.span("wait", label=purpose):
            until_s = time.monotonic() + _SHORT_S
            while time.monotonic() < until_s:
                if int(flags[layer]) >= epoch:
                    return
                time.sleep(_NAP_S)
            self._meetings.wait_until(purpose, lambda: [] if int(flags[layer]) >= epoch else self._late(rank, purpose))

    def _late(self, rank: int, purpose: str) -> list[int]:
        first = self.room.heap.first
        failed = [first + peer for peer in range(self.world) if int(self.room.failed[peer][0]) == self._number]
        if failed:
            names = ", ".join(f"rank {rank}" for rank in failed)
            raise PeerFailed(failed, f"rank {first + self.rank} waited for {purpose}, and {names} failed")
        return [first + rank]

    # ------------------------------------------------------------------ what layers do

    def spans(self, bounds: Sequence[int], pieces: Sequence[Piece | None]) -> list[Span]:
        """The pack's pieces. Raises RuntimeError if they are not in the plan of an open minibatch."""
        if len(bounds) - 1 != len(pieces):
            raise RuntimeError(
                f"the pack has {len(bounds) - 1} documents and says of {len(pieces)} which piece they are"
            )
        spans = [
            Span(piece, first, end)
            for piece, first, end in zip(pieces, bounds[:-1], bounds[1:], strict=True)
            if piece is not None
        ]
        for span in spans:
            if self.plan is None:
                raise RuntimeError(
                    f"the pack holds {span.piece}, and there is no plan: give it, minibatch(model, tokens=…, "
                    f"split=packs.split), or to evaluate split_forward(model, packs.split)"
                )
            self._planned(span.piece)
        return spans

    def _check_order(self, spans: list[Span]) -> None:
        """Rules 1 and 2 of [Note: waves]."""
        wave, here = self.plan.wave_of(spans[0].piece), {span.piece for span in spans}
        if (missing := self._missing_before(wave)) is not None:
            raise RuntimeError(missing)
        for planned in self._own:
            if (self.plan.wave_of(planned.piece) == wave) != (planned.piece in here):
                raise RuntimeError(
                    f"{planned.piece} and {spans[0].piece} are not in the packs that the plan has them in"
                )

    def _planned(self, piece: Piece) -> PlannedPiece:
        for planned in self._own:
            if planned.piece == piece:
                return planned
        raise RuntimeError(
            f"{piece} are not this rank's in the minibatch's plan: give minibatch() the split of the packs that it runs"
        )

    def _read(self, piece: Piece, window: int | None) -> tuple[SplitSequence, int]:
        """What a piece reads: tokens from there up to its own."""
        return self.plan.sequences[piece.sample], 0 if window is None else max(0, piece.start - window + 1)

    def sources(self, piece: Piece, window: int | None) -> list[PlannedPiece]:
        sequence, start = self._read(piece, window)
        return [each for each in sequence.before(piece) if each.piece.stop > start]

    def readers(self, piece: Piece, window: int | None) -> list[PlannedPiece]:
        sequence = self.plan.sequences[piece.sample]
        return [each for each in sequence.after(piece) if piece.stop > self._read(each.piece, window)[1]]

    def start(self, layer: int, spans: list[Span], *, trains: bool) -> None:
        """The forward of these pieces in that layer; `trains`: their keys or values need gradients.

        Raises RuntimeError where other ranks would wait for ever, or read what changes under them.
        """
        for span in spans:
            if (span.piece, layer) in self._attended:
                raise RuntimeError(
                    f"{span.piece} were computed before, and other ranks may have read them: run a pack with pieces "
                    f"once in a minibatch; forwards without gradients go before or after it, into split_forward"
                )
        if layer == 0:
            self._check_order(spans)
        if self._forward_only:
            return
        if not torch.is_grad_enabled():  # it may be a checkpoint, whose backward makes them
            self._may_return.update(span.piece for span in spans)
        elif trains:
            self._to_return.update((span.piece, layer) for span in spans)

    def _require_first(self, layer: int, spans: list[Span]) -> None:
        """Other ranks wait for one addition: a later one would be lost, or stay for the next minibatch."""
        for span in spans:
            if (span.piece, layer) in self._returned:
                raise RuntimeError(
                    f"{span.piece} had a backward already, and other ranks have taken their gradients from it: call "
                    f"backward once for a pack with pieces, on the sum of its losses"
                )

    def publish(self, layer: int, spans: list[Span], keys: torch.Tensor, values: torch.Tensor) -> None:
        """keys, values: [heads, T, D] of the pack."""
        for span in spans:
            planned = self._planned(span.piece)
            if planned.is_read:
                for kind, rows in ((KEYS, keys), (VALUES, values)):
                    place = self.room.rows(layer, kind, planned, span.piece.start, span.piece.stop)
                    place.copy_(rows[:, span.first : span.end])
        self.room.published[self.rank][layer] = self._epoch(spans[0].piece)

    def fetch(self, layer: int, piece: Piece, window: int | None) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Keys and values [heads, tokens, D] of what stands before `piece`; None for a first one."""
        sources = self.sources(piece, window)
        self._attended.add((piece, layer))
        if not sources:
            return None
        for source in sources:
            if source.rank != self.rank:
                purpose = f"keys and values of {source.piece} in layer {layer}"
                self._wait(purpose, source.rank, self.room.published[source.rank], layer, piece)
        sequence, start = self._read(piece, window)
        return tuple(self.room.read(layer, kind, sequence, start, piece.start) for kind in (KEYS, VALUES))

    def add(
        self,
        layer: int,
        spans: list[Span],
        window: int | None,
        gradients: Sequence[torch.Tensor | None],
    ) -> None:
        """Adds gradients of what was fetched. `gradients`: two for each span, [heads, tokens, D] or None."""
        self._require_first(layer, spans)
        owners: dict[int, int] = {}
        for at, span in enumerate(spans):
            start = self._read(span.piece, window)[1]
            for source in self.sources(span.piece, window):
                owners[source.rank] = self._epoch(span.piece)
                low, high = max(start, source.piece.start), source.piece.stop
                self._lock(layer, source)
                try:
                    for kind in (KEYS, VALUES):
                        if (rows := gradients[2 * at + kind]) is not None:
                            place = self.room.gradient_rows(layer, kind, source, low, high)
                            place.add_(rows[:, low - start : high - start])
                finally:
                    self.room.heap.unlock(layer, source.rank)
        for owner, epoch in owners.items():
            self.room.added[owner][self.rank, layer] = epoch

    def _lock(self, layer: int, source: PlannedPiece) -> None:
        heap, start_s = self.room.heap, time.monotonic()
        while not heap.try_lock(layer, source.rank):
            if time.monotonic() - start_s > self._meetings.timeout_s:
                holder = heap.lock_holder(layer, source.rank)
                ranks = [] if holder is None else [heap.first + holder]
                raise DeadlineExceeded(
                    ranks,
                    f"rank {heap.first + self.rank} could not add the gradients of {source.piece} in layer {layer}",
                )
            time.sleep(_NAP_S)

    def collect(
        self, layer: int, spans: list[Span], window: int | None, gradients: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """The gradients of the pack's keys and values, [heads, T, D] or None, with what later pieces have added."""
        self._require_first(layer, spans)
        readers_of = [self.readers(span.piece, window) for span in spans]
        if any(readers_of):
            gradients = [None if each is None else each.clone() for each in gradients]
        for span, readers in zip(spans, readers_of, strict=True):
            self._to_return.discard((span.piece, layer))
            self._may_return.discard(span.piece)
            self._returned.add((span.piece, layer))
            for reader in readers:
                if reader.rank != self.rank:
                    purpose = f"gradients of {span.piece} from {reader.piece} in layer {layer}"
                    self._wait(purpose, reader.rank, self.room.added[self.rank][reader.rank], layer, span.piece)
            if readers:
                planned = self._planned(span.piece)
                for kind, whole in ((KEYS, gradients[0]), (VALUES, gradients[1])):
                    place = self.room.gradient_rows(layer, kind, planned, span.piece.start, span.piece.stop)
                    if whole is not None:
                        own = whole[:, span.first : span.end]
                        own.copy_(own.to(place.dtype) + place)
                    place.zero_()
        return list(gradients)


class LayerSplit:
    """One layer's side of an exchange: what its attention calls."""

    def __init__(self, exchange: SequenceExchange, layer: int) -> None:
        self.exchange, self.layer = exchange, layer

    def publish(
        self, keys: torch.Tensor, values: torch.Tensor, spans: list[Span], window: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Passes keys and values [1, heads, T, D] through."""
        if not in_backward_pass():  # a recomputation finds its rows written
            self.exchange.start(self.layer, spans, trains=keys.requires_grad or values.requires_grad)
            self.exchange.publish(self.layer, spans, keys.detach()[0], values.detach()[0])
        return _Publish.apply(self, spans, window, keys, values)

    def fetch(
        self, keys: torch.Tensor, values: torch.Tensor, spans: list[Span], window: int | None
    ) -> list[tuple[torch.Tensor, torch.Tensor] | None]:
        """For each span the keys and values [1, heads, tokens, D] before it; None for a first piece."""
        found = _Fetch.apply(self, spans, window, keys, values)
        return [None if found[at] is None else (found[at], found[at + 1]) for at in range(0, len(found), 2)]


class _Publish(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, side: LayerSplit, spans: list[Span], window: int | None, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.side, ctx.spans, ctx.window = side, spans, window
        ctx.set_materialize_grads(False)
        return keys.view_as(keys), values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        rows = [None if each is None else each[0] for each in gradients]
        found = ctx.side.exchange.collect(ctx.side.layer, ctx.spans, ctx.window, rows)
        return None, None, None, *(None if each is None else each[None] for each in found)


class _Fetch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, side: LayerSplit, spans: list[Span], window: int | None, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        ctx.side, ctx.spans, ctx.window = side, spans, window
        ctx.set_materialize_grads(False)
        out: list[torch.Tensor | None] = []
        for span in spans:
            found = side.exchange.fetch(side.layer, span.piece, window)
            if found is None:
                out += [None, None]
            else:  # autocast may compute in another dtype than the room's
                out += [each[None].to(own.dtype) for each, own in zip(found, (keys, values), strict=True)]
        return tuple(out)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, ...]:
        rows = [None if each is None else each[0] for each in gradients]
        ctx.side.exchange.add(ctx.side.layer, ctx.spans, ctx.window, rows)
        return None, None, None, None, None
