"""Memory of split sequences with activation checkpointing: as planned, whatever the number of layers."""

from __future__ import annotations

import gc

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from odc_triton import enable_split, fully_shard, minibatch, replace_layers
from odc_triton.balance import PackedDataset, pack_collate
from odc_triton.engine.api import engine_of
from odc_triton.hf import compute_in_chunks, enable_packing, offload_checkpoints, summed_loss
from odc_triton.plan.line import Strip, zigzag
from odc_triton.plan.segments import SplitPlan
from odc_triton.sequence.exchange import SequenceExchange
from odc_triton.tools.memory.footprint import memory_plan
from odc_triton.tools.memory.traced import LiveBytes
from tests.sharding.test_footprint import hybrid
from tests.support import ranks, slow
from tests.support.parity import TRANSFORMS

LENGTH, WORLD = 1024, 2
OWN = LENGTH // WORLD


class CollectedBytes(LiveBytes):
    """Without what only a cycle keeps: when Python itself collects these depends on how many objects exist."""

    def __init__(self) -> None:
        super().__init__()
        gc.freeze()  # what is there already: collecting is then quick

    def _count(self, storage: torch.UntypedStorage) -> None:
        if self.now + storage.nbytes() > self.most:
            gc.collect()
        super()._count(storage)


def _model(layers: int, device: str = "cpu") -> Qwen3ForCausalLM:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    with torch.device(device):
        model = Qwen3ForCausalLM(
            Qwen3Config(hidden_size=48, intermediate_size=96, vocab_size=64, num_hidden_layers=layers, **heads)
        )
    return TRANSFORMS["checkpointing"](model)


def _most(rank: int, world: int, cells: list[tuple[int, bool]]) -> list[tuple[int, int, int]]:
    """For each number of layers, with or without offloading: most bytes in a microbatch; bytes of the K/V heap, and of
    the one for parameters and gradients.
    """
    deal = [[each] for each in zigzag(Strip(0, 0, LENGTH), world, 1)]
    ids = torch.randint(3, 64, (LENGTH,), generator=torch.Generator().manual_seed(0))
    (pack,) = pack_collate(PackedDataset([{"input_ids": ids, "labels": ids.clone()}]).__getitems__(deal[rank]))
    plan, found = SplitPlan.of(deal), []
    for layers, offload in cells:
        model = _model(layers)
        enable_packing(model)
        replace_layers(model, roles=["head"], verbose=False)
        compute_in_chunks(model, 64)
        model = fully_shard(model)
        enable_split(model, tokens=OWN)
        if offload:
            offload_checkpoints(model)
        for _ in range(2):
            with minibatch(model, tokens=1, split=plan), CollectedBytes() as live:
                summed_loss(model, pack).backward()
        own, split = engine_of(model).heap, engine_of(model).participant(SequenceExchange).buffers.heap
        found.append((live.most, split.size_bytes, own.size_bytes - own._data_offset))
    return found


def test_memory_is_as_planned_and_does_not_grow_with_layers() -> None:
    cells = [(2, False), (3, False), (3, True)]
    by_cell = zip(*ranks.run(_most, WORLD, cells), strict=True)
    sizes = []
    for (layers, offload), outcomes in zip(cells, by_cell, strict=True):
        plan = memory_plan(
            _model(layers, "meta"),
            WORLD,
            tokens_per_microbatch=OWN,
            gradient_checkpointing=True,
            split_tokens=OWN,
            offload_checkpoints=offload,
        )
        most, heap_bytes, own_bytes = (max(each) for each in zip(*outcomes, strict=True))
        kept = (2 if offload else layers) * OWN * 48 * 4
        without = most - kept * (not offload)  # what comes back from the host is not made by an operator
        assert without + kept == pytest.approx(plan.activation_bytes, rel=0.001)
        assert heap_bytes == pytest.approx(WORLD * plan.split_bytes, rel=0.01)
        assert own_bytes == plan.job_shared_bytes - WORLD * plan.split_bytes
        sizes.append((without, heap_bytes))
    (few, heap_of_few), (many, heap_of_many), (offloaded, _) = sizes
    assert few == pytest.approx(many, rel=0.001) == offloaded
    assert heap_of_many - heap_of_few < 2048  # flags


def _most_of_hybrid(rank: int, world: int, family: str, checkpointing: bool, lengths: list[int]) -> list[int]:
    """Most bytes in a microbatch for each length of a rank's part of a sample."""
    found = []
    for own in lengths:
        deal = [[each] for each in zigzag(Strip(0, 0, own * world), world, 1)]
        ids = torch.arange(own * world) % 40 + 3
        (pack,) = pack_collate(PackedDataset([{"input_ids": ids, "labels": ids.clone()}]).__getitems__(deal[rank]))
        model = TRANSFORMS["checkpointing"](hybrid(family)) if checkpointing else hybrid(family)
        enable_packing(model)
        if checkpointing:
            replace_layers(model, roles=["head"], verbose=False)
            compute_in_chunks(model, 64)
        model = fully_shard(model)
        enable_split(model, tokens=own)
        for _ in range(2):
            with minibatch(model, tokens=1, split=SplitPlan.of(deal)), CollectedBytes() as live:
                summed_loss(model, pack).backward()
        found.append(live.most)
    return found


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    ("family", "checkpointing"),
    [slow("Qwen3_5", True), slow("Qwen3_5", False), slow("NemotronH", True), slow("NemotronH", False)],
)
def test_split_hybrids_hold_what_is_planned_at_several_lengths(world: int, family: str, checkpointing: bool) -> None:
    """On the rank that holds most: a segment between two others keeps more than the first and the last."""
    lengths = [512, 1024, 2048]
    by_length = zip(*ranks.run(_most_of_hybrid, world, family, checkpointing, lengths), strict=True)
    for own, most in zip(lengths, by_length, strict=True):
        activations = {"gradient_checkpointing": checkpointing, "tokens_per_microbatch": own, "split_tokens": own}
        assert max(most) == pytest.approx(memory_plan(hybrid(family), world, **activations).activation_bytes, rel=0.03)
