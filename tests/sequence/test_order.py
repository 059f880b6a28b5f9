"""In which order a rank waits for others' flags, copies, adds and sets its own flags: its peers are simulated."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from odc_triton.engine.transport import DeviceStreams, Streams
from odc_triton.plan.entries import Segment
from odc_triton.plan.segments import SplitPlan
from odc_triton.sequence.attention import AttentionOfJoined, AttentionOfTree, SeenRows, parts_of
from odc_triton.sequence.buffers import Flag, LayerShape
from odc_triton.sequence.exchange import SequenceExchange, Span
from odc_triton.sequence.layer import LayerSplit, RowsOfOthers
from odc_triton.sequence.sync import Wait
from tests.support.simulated import SimulatedDevice

TOKENS = 40
PLAN = SplitPlan.of([[[Segment(0, start, start + 10)]] for start in range(0, TOKENS, 10)])
RANK, SPAN = 2, Span(Segment(0, 20, 30), 0, 10)  # it reads what ranks 0 and 1 have, and rank 3 reads what it has


class Peers:
    """Their keys and their additions come when this rank waits for the flags: ones. Two layers take turns in a buffer:
    once this rank has read what others hold, they write their next layer, twos. `done`: what this rank did; `held`: the
    rows of keys and values when it last set a flag or waited.
    """

    def __init__(self, *, apart: bool) -> None:
        self.rows = {name: torch.zeros(2, TOKENS, 1, 1) for name in ("PUBLISHED", "ADDED", "READ")}
        self.held = torch.zeros(0)
        self.done: list[str] = []
        self.added: list[torch.Tensor] = []
        self.buffers = SimpleNamespace(
            rank=RANK,
            world=4,
            layers=2,
            slots=[0, 0],
            stays=[False, True],
            tokens=TOKENS,
            shapes=[LayerShape(heads=1, widths=(1, 1), dtype="float32")] * 2,
            heap=SimpleNamespace(apart=apart),
            rows=lambda _layer, kind, segment, start, stop: self.rows["PUBLISHED"][kind, start:stop],
            gradient_rows=lambda _layer, kind, _segment, start, stop: self.rows["ADDED"][kind, start:stop],
        )

    def begin(self) -> None:
        pass

    def wait(self, wait: SimpleNamespace) -> None:
        self.done.append(f"wait {wait.flag.name}")
        self.held = self.rows["PUBLISHED"].clone()
        others = slice(0, 20) if wait.flag is Flag.PUBLISHED else slice(0, TOKENS)
        self.rows[wait.flag.name][:, others] = 1.0

    def signal(self, flag: SimpleNamespace, *_: object) -> None:
        self.done.append(f"signal {flag.name}")
        self.held = self.rows["PUBLISHED"].clone()
        if flag is Flag.READ:
            self.rows["PUBLISHED"][:, :20] = 2.0

    def add(self, _shown: Wait, owner: int, _place: torch.Tensor, rows: torch.Tensor, _purpose: str) -> None:
        self.done.append(f"add to {owner}")
        self.added.append(rows.clone())


def _exchange(*, apart: bool, in_order: bool = False) -> tuple[SequenceExchange, Peers]:
    peers = Peers(apart=apart)
    streams = DeviceStreams(SimulatedDevice("late")) if apart else Streams()
    exchange = SequenceExchange(peers, streams, grid=None, in_order=in_order)
    exchange.begin(PLAN)
    return exchange, peers


def _two(value: float, tokens: int = 10) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((tokens, 1, 1), value), torch.full((tokens, 1, 1), value)


def _own(rows: torch.Tensor) -> set[float]:
    return set(rows[:, SPAN.segment.start : SPAN.segment.stop].flatten().tolist())


@pytest.mark.parametrize("apart", [False, True])
def test_rows_are_there_before_their_flag(apart: bool) -> None:
    exchange, peers = _exchange(apart=apart)
    exchange.publish(0, [SPAN], None, _two(2.0))
    exchange.streams.drain(1.0, "a test")
    assert peers.done == ["signal PUBLISHED"]
    assert _own(peers.held) == {2.0}


@pytest.mark.parametrize("apart", [False, True])
def test_a_buffer_is_written_after_others_have_read_the_layer_before(apart: bool) -> None:
    """Not so in another wave, which has other rows, and in a recomputation."""
    exchange, peers = _exchange(apart=apart)
    exchange.publish(0, [SPAN], None, _two(2.0))
    wait, held = peers.wait, []
    peers.wait = lambda each: (wait(each), held.append(_own(peers.held)))
    exchange.publish(1, [SPAN], None, _two(3.0))
    assert (peers.done, held) == (["signal PUBLISHED", "wait READ", "signal PUBLISHED"], [{2.0}])
    assert _own(peers.held) == {3.0}
    peers.done.clear()
    with pytest.raises(RuntimeError, match="layer 0 is computed again before the backward of layer 1"):
        exchange.publish(0, [SPAN], None, _two(2.0), again=True)
    exchange.collect(1, [SPAN], None, _two(4.0))
    exchange.publish(0, [SPAN], None, _two(2.0), again=True)
    assert peers.done == ["wait ADDED", "signal PUBLISHED"]
    exchange._planned = lambda *_: replace(PLAN.segments[2], wave=1)
    exchange.publish(0, [SPAN], None, _two(2.0))
    assert peers.done[2:] == ["signal PUBLISHED"]


@pytest.mark.parametrize("apart", [False, True])
def test_keys_and_values_are_read_after_their_flags_have_come(apart: bool) -> None:
    exchange, peers = _exchange(apart=apart)
    runs = exchange.runs(0, [SPAN], None)
    assert runs == [(PLAN.segments[0], 0, 10), (PLAN.segments[1], 10, 20)]
    for run in runs:
        found = exchange.read(0, [SPAN], run, [torch.float64] * 2)
        found.start()
        for each in found.finish():
            assert each.flatten().tolist() == [1.0] * 10
            assert each.dtype == torch.float64
    assert peers.done == ["wait PUBLISHED"] * 2


@pytest.mark.parametrize("kind", [AttentionOfTree, AttentionOfJoined])
@pytest.mark.parametrize("apart", [False, True])
def test_others_write_their_next_layer_after_attention_has_read(apart: bool, kind: type) -> None:
    """Whatever the attention makes of it: all values are ones."""
    exchange, peers = _exchange(apart=apart)
    torch.testing.assert_close(_attend(kind, exchange, 0), torch.ones(1, 1, 10, 1))
    assert peers.done == ["signal PUBLISHED", *["wait PUBLISHED"] * 6, "signal READ"]
    assert peers.rows["PUBLISHED"][:, :20].eq(2.0).all()


@pytest.mark.parametrize("kind", [AttentionOfTree, AttentionOfJoined])
def test_a_backward_reads_again(kind: type) -> None:
    exchange, peers = _exchange(apart=True)
    out = _attend(kind, exchange, 1)
    peers.done.clear()
    out.sum().backward()
    assert peers.done[-2:] == ["signal ADDED", "wait ADDED"]
    assert all(rows.isfinite().all() for rows in peers.added)


def _attend(kind: type, exchange: SequenceExchange, layer: int) -> torch.Tensor:
    """To six runs of others, where all queries, keys and values are ones."""
    exchange.run_tokens = 4
    side, ones = LayerSplit(exchange, layer), torch.ones(1, 1, 10, 1, requires_grad=True)
    keys, values = side.publish((ones, ones), [SPAN])
    runs = exchange.runs(0, [SPAN], None)
    before = RowsOfOthers(side, [SPAN], runs, None, (torch.float32,) * 2)
    if kind is AttentionOfTree:
        parts = parts_of([0, 10], [[SeenRows(at, 0, each.high - each.low) for at, each in enumerate(runs, 1)]])
        return kind.apply(ones, keys, values, parts, None, before)

    def mean(
        query: torch.Tensor, _: torch.Tensor, values: torch.Tensor, __: None, *others: torch.Tensor
    ) -> torch.Tensor:
        return query * torch.cat([values, *others[1::2]], 2).mean()

    return kind.apply(mean, before, ones, keys, values, None)


@pytest.mark.parametrize("in_order", [False, True])
def test_a_flag_follows_the_additions_and_these_follow_earlier_ranks_if_in_order(in_order: bool) -> None:
    exchange, peers = _exchange(apart=True, in_order=in_order)
    _add(exchange)
    exchange.streams.drain(1.0, "a test")
    adds = [f"add to {owner}" for owner in (0, 1) * 2]
    assert sorted(peers.done[in_order:-1]) == sorted(adds)
    assert (peers.done[:in_order], peers.done[-1]) == (["wait ADDED"] * in_order, "signal ADDED")


def _add(exchange: SequenceExchange) -> None:
    additions = exchange.begin_adding(1, [SPAN], runs := exchange.runs(0, [SPAN], None), None)
    for run in runs:
        additions.add(run, _two(3.0))
    additions.end()


@pytest.mark.parametrize("wait", ["READ", "PUBLISHED", "ADDED"])
def test_additions_are_made_before_a_wait_for_others(wait: str) -> None:
    exchange, peers = _exchange(apart=True)
    exchange.publish(0, [SPAN], None, _two(2.0))
    if wait == "ADDED":
        exchange.publish(1, [SPAN], None, _two(2.0))
    peers.done.clear()
    _add(exchange)
    if wait == "READ":
        exchange.publish(1, [SPAN], None, _two(2.0))
    elif wait == "PUBLISHED":
        before = RowsOfOthers(
            LayerSplit(exchange, 0), [SPAN], exchange.runs(0, [SPAN], None), None, (torch.float32,) * 2
        )
        next(before.each())
    else:
        exchange.collect(1, [SPAN], None, _two(4.0))
    assert peers.done.index("signal ADDED") < peers.done.index(f"wait {wait}")


def test_gradients_are_taken_after_the_flags_of_those_who_add() -> None:
    exchange, _ = _exchange(apart=True)
    exchange.publish(1, [SPAN], None, _two(2.0))
    for each in exchange.collect(1, [SPAN], None, _two(4.0)):
        assert each.flatten().tolist() == [5.0] * 10
