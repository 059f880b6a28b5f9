"""Which pieces wait for which: readers of a piece and sources of another are two views of one relation."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from odc_triton.plan.entries import Piece
from odc_triton.plan.pieces import SplitPlan
from odc_triton.sequence.exchange import SequenceExchange


@given(st.lists(st.integers(1, 12), min_size=2, max_size=6), st.none() | st.integers(1, 20))
@example([10, 5, 26], 6)  # the piece in the middle is all that the last one reads
def test_readers_and_sources_agree(tokens: list[int], window: int | None) -> None:
    """A token attends to itself and the `window` - 1 before it."""
    pieces = [Piece(0, sum(tokens[:at]), sum(tokens[: at + 1])) for at in range(len(tokens))]
    exchange = object.__new__(SequenceExchange)  # of its parts they need the plan only
    exchange.plan, exchange.rank = SplitPlan.of([[[piece]] for piece in pieces]), None
    exchange._plans = [exchange.plan]
    attends = {
        (reader, source)
        for reader in pieces
        for source in pieces
        if source.start < reader.start and (window is None or source.stop - 1 > reader.start - window)
    }
    assert {(each, read.holder.piece) for each in pieces for read in exchange.reads(0, each, window)} == attends
    assert {(reader.piece, each) for each in pieces for reader in exchange.readers(0, each, window)} == attends
