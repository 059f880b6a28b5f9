"""Which segments wait for which: readers of a segment and sources of another are two views of one relation."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from odc_triton.plan.entries import Segment
from odc_triton.plan.segments import SplitPlan
from odc_triton.sequence.exchange import SequenceExchange


@given(st.lists(st.integers(1, 12), min_size=2, max_size=6), st.none() | st.integers(1, 20))
@example([10, 5, 26], 6)  # the segment in the middle is all that the last one reads
def test_readers_and_sources_agree(tokens: list[int], window: int | None) -> None:
    """A token attends to itself and the `window` - 1 before it."""
    segments = [Segment(0, sum(tokens[:at]), sum(tokens[: at + 1])) for at in range(len(tokens))]
    exchange = object.__new__(SequenceExchange)  # of its parts they need the plan only
    exchange.plan, exchange.rank = SplitPlan.of([[[segment]] for segment in segments]), None
    exchange._plans = [exchange.plan]
    attends = {
        (reader, source)
        for reader in segments
        for source in segments
        if source.start < reader.start and (window is None or source.stop - 1 > reader.start - window)
    }
    assert {(each, read.holder.segment) for each in segments for read in exchange.reads(0, each, window)} == attends
    assert {(reader.segment, each) for each in segments for reader in exchange.readers(0, each, window)} == attends
