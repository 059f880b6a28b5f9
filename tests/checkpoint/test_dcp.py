"""Optimizers and torch.distributed.checkpoint under either engine, as they are: a loop of one's own.

Parameters and states have the same bits on any number of ranks, and so have the next steps on one rank.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed import fsdp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from odc_triton import publish
from tests.support import ranks, slow
from tests.support.checkpointed import Whole, assert_same, train, whole
from tests.support.models import build
from tests.support.replicas import mesh_of

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def _made(engine: str, name: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    import odc_triton

    model = build(name, seed)
    if engine == "use_odc":
        for block in model.model.layers:
            fsdp.fully_shard(block)
        odc_triton.use_odc(fsdp.fully_shard(model))
    else:
        dtype = torch.bfloat16 if engine == "in bf16" else None
        mesh = mesh_of((2, dist.get_world_size() // 2)) if engine == "two replicas" else None
        policy = odc_triton.MixedPrecisionPolicy(param_dtype=dtype)
        model = odc_triton.fully_shard(model, mesh=mesh, mp_policy=policy)
    # Its epsilon keeps AdamW from making much of gradients that are nearly rounding.
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def _save(rank: int, world: int, engine: str, name: str, folder: Path) -> tuple[Whole, list[float], Whole]:
    """What there is at step 2, the losses of the next two steps, what there is then."""
    model, optimizer = _made(engine, name, 0)
    train(model, optimizer, name, range(2))
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder / "sharded")
    state = {
        "model": get_model_state_dict(model, options=FULL),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=FULL),
    }
    if rank == 0:
        assert all(not hasattr(value, "full_tensor") for value in state["model"].values())
        torch.save(state, folder / "whole.pt")
    there = whole(model, optimizer)
    return there, train(model, optimizer, name, range(2, 4)), whole(model, optimizer)


def _load(
    rank: int, world: int, engine: str, name: str, folder: Path, ways: tuple[str, ...]
) -> dict[str, tuple[Whole, list[float], Whole]]:
    """The same of a model that was loaded, by how."""
    found = {}
    for way in ways:
        model, optimizer = _made(engine, name, 9)
        if way == "sharded":
            weights, states = get_state_dict(model, optimizer)
            dcp.load({"model": weights, "optimizer": states}, checkpoint_id=folder / "sharded")
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
        else:
            everywhere = way != "whole on rank 0"
            here = rank == 0 or everywhere
            state = torch.load(folder / "whole.pt", weights_only=False) if here else {"model": {}, "optimizer": {}}
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=not everywhere)
            if way == "in place":
                dcp.load({"model": model.state_dict()}, checkpoint_id=folder / "sharded")
                publish(model)
            else:
                set_model_state_dict(model, state["model"], options=options)
            set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
        there = whole(model, optimizer)
        found[way] = there, train(model, optimizer, name, range(2, 4)), whole(model, optimizer)
    return found


WHOLE = ("in place", "whole on rank 0", "whole everywhere")


@pytest.mark.parametrize(
    ("engine", "name", "worlds", "ways"),
    [
        # A scalar, an empty parameter, fewer rows than ranks. torch's whole optimizer state dicts hold a scalar's
        # moments as plain tensors, which no optimizer accepts beside a DTensor.
        slow("fully_shard", "conv", (3, 1), ("sharded",)),
        ("two replicas", "conv", (4, 2), ("sharded",)),
        slow("in bf16", "qwen2", (2, 3), WHOLE),
        ("fully_shard", "gpt2-tied", (2, 3), WHOLE),
        ("use_odc", "qwen2", (2, 3), ("sharded",)),
        slow("use_odc", "qwen2", (1, 1), ("sharded",)),
    ],
)
def test_a_loop_goes_on(tmp_path: Path, engine: str, name: str, worlds: tuple[int, int], ways: tuple[str, ...]) -> None:
    (saved, want, after), *_ = ranks.run(_save, worlds[0], engine, name, tmp_path)
    assert any(key.endswith(".exp_avg_sq") for key in saved)
    # fp32 sums over ranks in the order of their arrival; on one rank all bits are the same.
    tolerance = {"rtol": 0, "atol": 0} if worlds == (1, 1) else {"rtol": 1e-5, "atol": 1e-6}
    for found in ranks.run(_load, worlds[1], engine, name, tmp_path, ways):
        for loaded, losses, its in found.values():
            assert_same(loaded, saved, rtol=0, atol=0)
            torch.testing.assert_close(losses, want, **tolerance)
            if engine != "in bf16":
                assert_same(its, after, **tolerance)
