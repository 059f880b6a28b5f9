"""A causal convolution over the documents of a pack: each sees the rows before it that its sample has, else zeros."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor

from ..plan.entries import Segment
from ..sequence.exchange import Span
from ..sequence.layer import LayerSplit
from .documents import Document
from .exchange import Others


def convolve_documents(
    function: Callable[[Tensor], Tensor],
    inputs: Tensor,
    rows: int,
    documents: Sequence[Document],
    side: LayerSplit | None,
    spans: Sequence[Span],
) -> Tensor:
    """`inputs` and the result: [1, channels, T]. `function`: the convolution of one document; `rows`: those before a
    token that it needs. `spans`: the segments of a plan over ranks.

    One call on all documents, laid end to end with the rows before each.
    """
    own, others = inputs.transpose(1, 2), None
    if side is not None and spans:
        own, others = _exchanged(own, rows, {each.segment: each for each in documents}, side, spans)
    sources, first_of = [own], {each.segment: each for each in documents}
    zeros, past = own.shape[1], own.shape[1] + 1  # the index of a row of zeros, and of the next further row
    taken: list[range | list[int]] = []
    kept: list[range] = []
    end = 0
    for document in documents:
        before: list[int] = []
        further = iter([] if others is None or document.segment is None else others.of(document.segment))
        for holder, low, high in document.before(rows):
            if isinstance(holder, Segment):
                before.extend(range(first_of[holder].row(low), first_of[holder].row(high)))
            else:
                (found,) = next(further)
                sources.append(found[:, 0])
                before.extend(range(past, past := past + high - low))
        before = [zeros] * (rows - len(before)) + before
        taken += [before, range(document.first, document.end)]
        kept.append(range(end + rows, end := end + rows + document.end - document.first))
    sources.insert(1, own.new_zeros(1, 1, own.shape[2]))
    every = torch.cat(sources, dim=1).index_select(1, _indices(taken, own.device))
    return function(every.transpose(1, 2)).index_select(2, _indices(kept, own.device))


def _indices(parts: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    return torch.tensor([*chain.from_iterable(parts)], device=device)


def _exchanged(
    own: Tensor, rows: int, documents: dict[Segment | None, Document], side: LayerSplit, spans: Sequence[Span]
) -> tuple[Tensor, Others]:
    """`own`, [1, T, channels], once it is published, and the rows of other ranks."""
    shown, at, here = [], 0, []
    for span in spans:
        document = documents[span.segment]
        for token in document.shown:
            # What a segment shorter than that lacks is not read.
            end = document.row(token)
            shown += [own.shape[1]] * (rows - (end - document.first)) + [*range(max(end - rows, document.first), end)]
        here.append(Span(span.segment, at, at := at + rows * len(document.shown)))
    padded = F.pad(own, (0, 0, 0, 1))
    at_cuts = padded.index_select(1, _indices([shown], own.device).long())[:, None]
    _, own = side.publish([at_cuts], here, None, own)
    return own, Others(side, here, [own.dtype], own)
