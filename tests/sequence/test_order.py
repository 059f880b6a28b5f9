"""In which order a rank waits for others' flags, copies, adds and sets its own flags: its peers are simulated."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from odc_triton.balance.pieces import Piece, SplitPlan
from odc_triton.engine.transport import DeviceStreams, Streams
from odc_triton.sequence.exchange import SequenceExchange, Span
from odc_triton.sequence.fetched import Fetched
from odc_triton.sequence.sync import Wait
from odc_triton.sequence.tree import RemoteRows
from tests.support.simulated import SimulatedDevice

TOKENS = 40
PLAN = SplitPlan.of([[[Piece(0, start, start + 10)]] for start in range(0, TOKENS, 10)])
RANK, SPAN = 2, Span(Piece(0, 20, 30), 0, 10)  # it reads what ranks 0 and 1 have, and rank 3 reads what it has


class Peers:
    """Their keys and their additions come when this rank waits for the flags: ones. `done`: what this rank did;
    `published`: the rows when it last set a flag.
    """

    def __init__(self, *, apart: bool) -> None:
        self.rows = {name: torch.zeros(2, TOKENS, 1, 1) for name in ("PUBLISHED", "ADDED")}
        self.done: list[str] = []
        self.buffers = SimpleNamespace(
            rank=RANK,
            world=4,
            layers=1,
            tokens=TOKENS,
            heap=SimpleNamespace(apart=apart),
            rows=lambda _layer, kind, _piece, start, stop: self.rows["PUBLISHED"][kind, start:stop],
            gradient_rows=lambda _layer, kind, _piece, start, stop: self.rows["ADDED"][kind, start:stop],
        )

    def begin(self) -> None:
        pass

    def wait(self, wait: SimpleNamespace) -> None:
        self.done.append(f"wait {wait.flag.name}")
        self.rows[wait.flag.name].fill_(1.0)

    def signal(self, flag: SimpleNamespace, *_: object) -> None:
        self.done.append(f"signal {flag.name}")
        self.published = self.rows["PUBLISHED"].clone()

    def add(self, _shown: Wait, owner: int, *_: object) -> None:
        self.done.append(f"add to {owner}")


def _exchange(*, apart: bool, in_order: bool = False) -> tuple[SequenceExchange, Peers]:
    peers = Peers(apart=apart)
    streams = DeviceStreams(SimulatedDevice("late")) if apart else Streams()
    exchange = SequenceExchange(peers, streams, grid=None, in_order=in_order)
    exchange.begin(PLAN)
    return exchange, peers


def _two(value: float, tokens: int = 10) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((tokens, 1, 1), value), torch.full((tokens, 1, 1), value)


@pytest.mark.parametrize("apart", [False, True])
def test_rows_are_there_before_their_flag(apart: bool) -> None:
    exchange, peers = _exchange(apart=apart)
    exchange.publish(0, [SPAN], None, _two(2.0))
    exchange.streams.drain(1.0, "a test")
    assert peers.done == ["signal PUBLISHED"]
    assert peers.published[:, SPAN.piece.start : SPAN.piece.stop].flatten().tolist() == [2.0] * 20


@pytest.mark.parametrize("apart", [False, True])
def test_keys_and_values_are_read_after_their_flags_have_come(apart: bool) -> None:
    exchange, peers = _exchange(apart=apart)
    (run,) = exchange.runs([SPAN], None)
    assert run == RemoteRows(PLAN.pieces[:2], 0, 20)
    found = exchange.read(0, [SPAN], run, [torch.float64] * 2)
    if isinstance(found, Fetched):
        found.finish()
    for each in found.rows if isinstance(found, Fetched) else found:
        assert each.flatten().tolist() == [1.0] * 20
        assert each.dtype == (torch.float64 if apart else torch.float32)
    assert peers.done == ["wait PUBLISHED"]


@pytest.mark.parametrize("in_order", [False, True])
def test_a_flag_follows_the_additions_and_these_follow_earlier_ranks_if_in_order(in_order: bool) -> None:
    exchange, peers = _exchange(apart=True, in_order=in_order)
    exchange.add(0, [SPAN], exchange.runs([SPAN], None), None, _two(3.0, tokens=20))
    exchange.streams.drain(1.0, "a test")
    adds = [f"add to {owner}" for owner in (0, 1) * 2]
    assert sorted(peers.done[in_order:-1]) == sorted(adds)
    assert (peers.done[:in_order], peers.done[-1]) == (["wait ADDED"] * in_order, "signal ADDED")


def test_gradients_are_taken_after_the_flags_of_those_who_add() -> None:
    exchange, _ = _exchange(apart=True)
    for each in exchange.collect(0, [SPAN], None, _two(4.0)):
        assert each.flatten().tolist() == [5.0] * 10
