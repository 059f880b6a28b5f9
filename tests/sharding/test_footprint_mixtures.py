"""memory_plan of mixtures of experts against the bytes that are allocated."""

from __future__ import annotations

import pytest
import torch

from odc_triton.sharding.footprint import MemoryPlan, memory_plan
from tests.support import ranks, slow
from tests.support.models import MIXTURES, build

TOKENS = 300  # of each rank, for split sequences


def _allocated(rank: int, world: int, name: str) -> tuple[int, int, int, int]:
    """Bytes that the job shares, for parameters and for split sequences; this rank's masters and optimizer states."""
    from odc_triton import MixedPrecisionPolicy, enable_split, fully_shard
    from odc_triton.hf import enable_packing

    model = build(name)
    enable_packing(model)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    kept = sum(t.to_local().nbytes for s in optimizer.state.values() for t in s.values() if hasattr(t, "to_local"))
    masters = sum(p.to_local().nbytes for p in model.parameters())
    enable_split(model, tokens=TOKENS)
    heaps = (model._odc_engine.heap, model._odc_engine.participant("split").buffers.heap)
    shared, split = (heap.size_bytes - heap._data_offset for heap in heaps)
    return shared, split, masters, kept


def _planned(name: str, world: int) -> MemoryPlan:
    from odc_triton import MixedPrecisionPolicy

    with torch.device("meta"):
        model = build(name)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    return memory_plan(model, world, mp_policy=policy, split_tokens=TOKENS)


@pytest.mark.parametrize(("name", "world"), [("deepseek-v3", 2), *(slow(name, 4) for name in MIXTURES)])
def test_plan_is_what_is_allocated(name: str, world: int) -> None:
    """Four ranks, each with two of five experts or six: the last one has none."""
    plan = _planned(name, world)
    outcomes = ranks.run(_allocated, world, name)
    for shared, split, _, _ in outcomes:
        assert split == pytest.approx(world * plan.split_bytes, rel=0.01)
        assert shared == plan.job_shared_bytes - world * plan.split_bytes
    _, _, masters, kept = outcomes[0]  # no rank has more
    assert (masters, kept) == (max(each[2] for each in outcomes), max(each[3] for each in outcomes))
    assert masters == plan.master_shard_bytes
    assert kept == plan.optimizer_state_bytes - 4 * len(list(build(name).parameters()))  # a step count each
