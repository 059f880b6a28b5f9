"""memory_plan against what the kernel counts, on the demo's model."""

from __future__ import annotations

import ctypes

import pytest
import torch

from bench.demo import CONFIG
from bench.harness import PeakMemory, Work
from odc_triton.sharding.footprint import memory_plan
from tests.support import ranks


def measured(rank: int, world: int) -> dict[str, int]:
    import torch.distributed as dist

    from odc_triton import fully_shard, minibatch

    def train(model: torch.nn.Module, batch: torch.Tensor) -> torch.optim.Optimizer:
        """Everything but the step: the fused AdamW, as the others leave temporaries with malloc."""
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        with minibatch(model, tokens=1):
            model(input_ids=batch, use_cache=False).logits.sum().backward()
        return optimizer

    ids = torch.arange(16)[None]
    small = CONFIG | {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 64}
    warm_up = fully_shard(Work(dataset="", config=small, minibatches=[], token_cap=128).build())
    train(warm_up, ids).step()  # what torch itself sets up on first use, per operator and shape
    work = Work(dataset="", config=CONFIG, minibatches=[], token_cap=128)
    with torch.device("meta"):
        model = work.build()
    before, _ = PeakMemory.read()
    model = fully_shard(model)
    sharded, _ = PeakMemory.read()
    optimizer = train(model, ids)
    ctypes.CDLL(None).malloc_trim(0)  # the states must not be made of what the backward freed
    unstepped, _ = PeakMemory.read()
    dist.barrier()
    _, shared = PeakMemory.read()
    dist.barrier()
    optimizer.step()
    stepped, _ = PeakMemory.read()
    return {"shared": shared, "growth by fully_shard": sharded - before, "states": stepped - unstepped}


def test_plan_is_within_5_percent_of_what_is_measured() -> None:
    world = 2
    work = Work(dataset="", config=CONFIG, minibatches=[], token_cap=128)
    plan = memory_plan(work.build(), world, backend="cpu")
    outcomes = ranks.run(measured, world)
    # Parameters once and gradients once for the whole job.
    assert sum(outcome["shared"] for outcome in outcomes) == pytest.approx(plan.job_shared_bytes, rel=0.05)
    for outcome in outcomes:
        assert outcome["states"] == pytest.approx(plan.optimizer_state_bytes, rel=0.05)
        # No rank holds a private copy of the 40 MB of parameters; rank 0 initialises unit by unit.
        assert outcome["growth by fully_shard"] < 8e6
