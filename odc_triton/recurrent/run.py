"""A recurrence over the documents of a pack, and over pieces of samples whose states other ranks have."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..plan.entries import Piece
from ..sequence.exchange import Span
from ..sequence.layer import LayerSplit
from .documents import Document
from .exchange import Others
from .rules import Affine, Rule, add_reads


def run_documents(rule: Rule, documents: Sequence[Document], side: LayerSplit | None, spans: Sequence[Span]) -> Tensor:
    """What comes out of all rows of a pack, [1, T, heads, width]. `spans`: the pieces of a plan over ranks."""
    return _Run(rule, documents).over_ranks(side, spans) if side is not None and spans else _Run(rule, documents).here()


class _Run:
    def __init__(self, rule: Rule, documents: Sequence[Document]) -> None:
        self._rule, self._documents = rule, documents
        self._out: dict[int, Tensor] = {}  # by the document's first row
        self._states: dict[tuple[Piece, int], Tensor] = {}  # after a token of a piece
        # What goes on from another piece of the pack comes after it.
        self._order = sorted(documents, key=lambda each: each.piece.start if each.piece else 0)

    def here(self) -> Tensor:
        for each in self._order:
            self._run(each, self._base(each))
        return self._joined()

    def _base(self, document: Document) -> Tensor | None:
        return None if document.base is None else self._states[document.base]

    def _joined(self) -> Tensor:
        parts = [self._out[each.first] for each in self._documents if each.end > each.first]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _bounds(self, document: Document) -> list[tuple[int, int, int | None]]:
        """Its rows, cut where others go on, and the tokens there."""
        found, first = [], document.first
        for token in document.ends:
            found.append((first, document.row(token), token))
            first = document.row(token)
        return found if first == document.end else [*found, (first, document.end, None)]

    def _run(self, document: Document, state: Tensor | None) -> None:
        outs = []
        for first, end, token in self._bounds(document):
            out, state = self._rule.run(first, end, state)
            outs.append(out)
            if token is not None and document.piece is not None:
                self._states[document.piece, token] = state
        self._out[document.first] = outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)

    def over_ranks(self, side: LayerSplit, spans: Sequence[Span]) -> Tensor:
        self._steps: dict[tuple[Piece, int], Affine] = {}  # of pieces whose state others have, up to a token
        local: dict[int, tuple[Tensor, Tensor]] = {}
        waits: set[Piece] = set()
        for each in self._order:
            if each.follows_others or (each.base is not None and each.base[0] in waits):
                assert each.piece is not None, "it reads"
                waits.add(each.piece)
                if each.shown:
                    local[each.first] = self._affine(each)
            else:
                self._run(each, self._base(each))
        others, rule = self._exchange(side, spans), self._rule
        for each in self._order:
            if each.piece not in waits:
                continue
            state = self._base(each)
            for step in map(rule.of_rows, others.of(each.piece)):
                state = step.b if state is None else rule.after(state, step)
            if each.first not in local:
                self._run(each, state)
                continue
            self._out[each.first] = add_reads(*local[each.first], state)
            for token in each.ends:
                self._states[each.piece, token] = rule.after(state, self._steps[each.piece, token])
        return self._joined()

    def _affine(self, document: Document) -> tuple[Tensor, Tensor]:
        found, step = [], None
        for first, end, token in self._bounds(document):
            *out, step = self._rule.affine(first, end, step)
            found.append(out)
            if token is not None and document.piece is not None:
                self._steps[document.piece, token] = step
        local, reads = (torch.cat(parts, dim=1) for parts in zip(*found, strict=True))
        return local, reads

    def _exchange(self, side: LayerSplit, spans: Sequence[Span]) -> Others:
        """Publishes the states of `spans`; what has come out already then depends on that."""
        documents, shape = {each.piece: each for each in self._documents}, side.exchange.buffers.shapes[side.layer]
        dtype, inputs = getattr(torch, shape.dtype), self._rule.inputs
        rows = [[inputs[0].new_empty(1, shape.heads, 0, width, dtype=dtype) for width in shape.widths]]
        own, at = [], 0
        for span in spans:
            piece, shown = span.piece, documents[span.piece].shown
            own.append(Span(piece, at, at := at + len(shown)))
            for token in shown:
                step = self._steps.get((piece, token)) or self._rule.known(self._states[piece, token])
                rows.append([each.flatten(2).unsqueeze(2) for each in step])
        both = [torch.cat(kind, dim=2) for kind in zip(*rows, strict=True)]
        done = [each.first for each in self._documents if each.first in self._out]
        given = next((each for each in inputs if each.requires_grad), inputs[0])[:, :1]
        _, _, anchor, *outs = side.publish(both, own, None, given, *(self._out[first] for first in done))
        self._out.update(zip(done, outs, strict=True))
        return Others(side, own, [dtype, dtype], anchor)
