"""Buffers that layers take in turn: who reads late still reads its layer, and few layers' rows are kept."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from odc_triton import enable_split, fully_shard
from odc_triton.engine.api import engine_of
from odc_triton.engine.unit import in_backward_pass
from odc_triton.sequence.attention import Pair
from odc_triton.sequence.buffers import LayerShape, slots_of
from odc_triton.sequence.exchange import SequenceExchange
from odc_triton.sequence.layer import RowsOfOthers
from tests.support import ranks, slow
from tests.support.splitting import Setup, build, plain, sharded, step_on

SIX = (("num_hidden_layers", 6),)


def _reads_late(rank: int, world: int, setup: Setup, when: str, at_layer: int) -> tuple[bool, dict[str, torch.Tensor]]:
    """Rank 1 stays between two runs of rank 0's keys until rank 0 waits or is at the exit; whether it did."""
    model, each, stayed = sharded(setup, rank), RowsOfOthers.each, []
    barrier, waits = engine_of(model).barrier, engine_of(model).participant(SequenceExchange).sync.waits._waits

    def late(self: RowsOfOthers, *, backward: bool = False) -> Iterator[tuple[int, Pair]]:
        now = "backward" if backward else "again" if in_backward_pass() else "forward"
        for run in each(self, backward=backward):
            if (now, self._of[0], stayed) == (when, at_layer, []):
                while not waits.seen()[0] and barrier._reached.seen()[0] <= barrier.passed:
                    time.sleep(0.01)
                stayed.append(True)
            yield run

    RowsOfOthers.each = late
    try:
        _, found = step_on(model, setup, rank)
        return bool(stayed), found
    finally:
        RowsOfOthers.each = each


@pytest.mark.parametrize("backend", [slow("cpu"), "cpu-sharded"])
def test_a_late_reader_never_sees_the_next_layers_rows(backend: str) -> None:
    setup = Setup(backend=backend, change="checkpointing", sizes=SIX, in_flight=2, run_tokens=5)
    places = [("forward", 0), ("again", 3), ("backward", 3)]
    want = plain(Setup(change="checkpointing", sizes=SIX))[1]
    for place, outcomes in zip(
        places, ranks.run_all(2, *((_reads_late, setup, *place) for place in places)), strict=True
    ):
        assert [stayed for stayed, _ in outcomes] == [False, True], place
        for _, found in outcomes:
            for name, gradient in want.items():
                assert (found[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-7, (place, name)


@pytest.mark.parametrize(
    ("change", "in_flight", "buffers"),
    [("checkpointing", None, 2), ("checkpointing", 1, 1), ("checkpointing", 9, 6), ("none", None, 6), ("none", 3, 3)],
)
def test_rows_of_so_many_layers_are_kept(change: str, in_flight: int | None, buffers: int) -> None:
    exchange = engine_of(sharded(Setup(change=change, sizes=SIX, in_flight=in_flight), rank=0)).participant(
        SequenceExchange
    )
    kept = {each.data_ptr() for buffer in exchange.buffers._buffers for kind in buffer for each in kind}
    assert len(kept) == 4 * buffers
    assert exchange.buffers.stays == [layer >= 6 - buffers for layer in range(6)]


class _Two(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor, **given: Any) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, **given)
        return x


@pytest.mark.parametrize(("together", "buffers"), [(1, 2), (2, 6)])
def test_layers_in_torchs_wrapper(together: int, buffers: int) -> None:
    """Few buffers are the default only where a checkpoint has one layer."""
    model = build(Setup(sizes=SIX), replaced=False)
    layers = [*model.model.layers] if together == 1 else [*map(_Two, model.model.layers[::2], model.model.layers[1::2])]
    model.model.layers = nn.ModuleList(map(checkpoint_wrapper, layers))
    enable_split(fully_shard(model), tokens=8)
    assert len(engine_of(model).participant(SequenceExchange).buffers._buffers) == buffers


def test_a_frozen_model_has_two_buffers_and_none_of_gradients() -> None:
    model = fully_shard(build(Setup(sizes=SIX), replaced=True).requires_grad_(False))
    enable_split(model, tokens=8)
    assert [len(kinds) for kinds in engine_of(model).participant(SequenceExchange).buffers._buffers] == [2, 2]


def test_layers_of_one_shape_take_turns() -> None:
    wide, narrow = (LayerShape(heads=2, widths=(width, 8), dtype="float32") for width in (8, 4))
    layers = [wide, narrow, wide, wide, narrow, wide]
    assert slots_of(layers, 1) == [0, 1, 0, 0, 1, 0]
    assert slots_of(layers, 2) == [0, 1, 2, 0, 3, 2]
    assert slots_of(layers, 9) == [*range(6)]
