"""A recurrence over the documents of a pack, and over segments of samples whose states other ranks have.

Documents are cut where others go on from them; parts whose states are known run in one call, where a package has one
for several documents. Over ranks a segment that is between those of other ranks runs as an affine function of its
state.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..plan.entries import Segment
from ..sequence.exchange import Span
from ..sequence.layer import LayerSplit
from .documents import Document
from .exchange import Others
from .rules import Affine, Rule, add_reads

_Place = tuple[Segment, int]  # a segment, and a token up to which it was computed


class _Stretch(NamedTuple):
    """Rows of a document, from a state to the next that others go on from."""

    document: Document
    first: int
    end: int
    before: _Place | None
    after: _Place | None


def run_documents(rule: Rule, documents: Sequence[Document], side: LayerSplit | None, spans: Sequence[Span]) -> Tensor:
    """What comes out of all rows of a pack, [1, T, heads, width]. `spans`: the segments of a plan over ranks."""
    run = _PackRun(rule, documents)
    if side is None or not spans:
        run.advance(documents)
    else:
        run.over_ranks(side, spans)
    return run.joined()


class _PackRun:
    def __init__(self, rule: Rule, documents: Sequence[Document]) -> None:
        self._rule, self._documents = rule, documents
        self._out: dict[int, Tensor] = {}  # by first row
        self._states: dict[_Place, Tensor] = {}
        # Of documents that are affine functions: what comes out of them, and what becomes of a state.
        self._affine: dict[int, tuple[Tensor, Tensor]] = {}
        self._steps: dict[_Place, Affine] = {}
        self._others: Others | None = None

    def joined(self) -> Tensor:
        parts = [self._out[first] for first in sorted(self._out)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def advance(self, documents: Iterable[Document]) -> None:
        """Runs them, in an order in which each finds its state."""
        parts = [part for each in documents for part in self._stretches(each)]
        while parts:
            ready = [part for part in parts if part.before is None or part.before in self._states]
            states, bounds = [self._before(part) for part in ready], [(part.first, part.end) for part in ready]
            parts = [part for part in parts if part not in ready]
            found = self._rule.run_all(bounds, states, final=any(part.after for part in ready))
            for part, (out, state) in zip(ready, found, strict=True):
                self._out[part.first] = out
                if part.after is not None and state is not None:
                    self._states[part.after] = state

    def _stretches(self, document: Document) -> list[_Stretch]:
        found, first, before = [], document.first, document.base
        for token in document.ends:
            assert document.segment is not None, "others go on from it"
            after = (document.segment, token)
            found.append(_Stretch(document, first, document.row(token), before, after))
            first, before = document.row(token), after
        if not found or first < document.end:
            found.append(_Stretch(document, first, document.end, before, None))
        return found

    def _before(self, part: _Stretch) -> Tensor | None:
        state = None if part.before is None else self._states[part.before]
        return self._start(part.document, state) if part.first == part.document.first else state

    def _start(self, document: Document, state: Tensor | None) -> Tensor | None:
        """The state before a document. `state`: after the last segment of the pack before it."""
        for rows in [] if self._others is None or document.segment is None else self._others.of(document.segment):
            step = self._rule.of_rows(rows)
            state = step.b if state is None else self._rule.after(state, step)
        return state

    def over_ranks(self, side: LayerSplit, spans: Sequence[Span]) -> None:
        """Runs what needs no other rank; publishes states, or what becomes of them; then runs the others."""
        # What goes on from another segment of the pack begins later.
        ordered = sorted(self._documents, key=lambda each: 0 if each.segment is None else each.segment.start)
        waiting: dict[Segment | None, Document] = {}
        for each in ordered:
            if each.follows_others or (each.base is not None and each.base[0] in waiting):
                waiting[each.segment] = each
        self.advance(each for each in ordered if each.segment is None or each.segment not in waiting)
        for each in waiting.values():
            if each.shown:
                self._affine[each.first] = self._as_affine(each)
        self._others = self._exchange(side, spans)
        for each in waiting.values():
            if each.first not in self._affine:
                self.advance([each])
                continue
            state = self._start(each, None if each.base is None else self._states[each.base])
            assert state is not None, "it follows others"
            self._out[each.first] = add_reads(*self._affine[each.first], state)
            for place in ((each.segment, token) for token in each.ends if each.segment is not None):
                self._states[place] = self._rule.after(state, self._steps[place])

    def _as_affine(self, document: Document) -> tuple[Tensor, Tensor]:
        found, step = [], None
        for part in self._stretches(document):
            *out, step = self._rule.affine(part.first, part.end, step)
            found.append(out)
            if part.after is not None:
                self._steps[part.after] = step
        local, reads = (torch.cat(parts, dim=1) for parts in zip(*found, strict=True))
        return local, reads

    def _exchange(self, side: LayerSplit, spans: Sequence[Span]) -> Others:
        """Publishes the states of `spans`; what has come out already then depends on that."""
        documents, shape = {each.segment: each for each in self._documents}, side.exchange.buffers.shapes[side.layer]
        dtype, inputs = getattr(torch, shape.dtype), self._rule.inputs
        rows = [[inputs[0].new_empty(1, shape.heads, 0, width, dtype=dtype) for width in shape.widths]]
        own, at = [], 0
        for span in spans:
            shown = documents[span.segment].shown
            own.append(Span(span.segment, at, at := at + len(shown)))
            for place in ((span.segment, token) for token in shown):
                step = self._steps.get(place) or self._rule.known(self._states[place])
                rows.append([each.flatten(2).unsqueeze(2) for each in step])
        both = [torch.cat(kind, dim=2) for kind in zip(*rows, strict=True)]
        done = [*self._out]
        given = next((each for each in self._rule.terms if each.requires_grad), inputs[0]).flatten()[:1]
        _, _, anchor, *outs = side.publish(both, own, None, given, *(self._out[first] for first in done))
        self._out.update(zip(done, outs, strict=True))
        return Others(side, own, [dtype, dtype], anchor)
