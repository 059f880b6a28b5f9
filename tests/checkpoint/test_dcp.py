"""Optimizers, clipping and torch.distributed.checkpoint on the sharded parameters, as they are."""

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
    set_model_state_dict,
    set_optimizer_state_dict,
)

from tests.support import ranks, slow
from tests.support.models import CASES, build, microbatches

BF16 = torch.bfloat16


def _make(name: str, bf16: bool, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    from odc_triton import MixedPrecisionPolicy, fully_shard

    model = fully_shard(build(name, seed), mp_policy=MixedPrecisionPolicy(param_dtype=BF16 if bf16 else None))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, name: str, steps: range, rank: int) -> list[float]:
    """Losses of whole minibatches: the same samples whatever the world; the last rank may have none."""
    from odc_triton import minibatch

    case, losses = CASES[name], []
    for step in steps:
        batches = microbatches(name, [6, 9], seed=step)
        mine = batches[rank : rank + 1]
        total = torch.zeros(())
        with minibatch(model, tokens=sum(case.count(batch) for batch in mine)) as mb:
            for batch in mine:
                loss = case.loss(model, batch) / mb.tokens
                loss.backward()
                total += loss.detach().float()
        dist.all_reduce(total)
        losses.append(total.item())
        optimizer.step()
    return losses


# ------------------------------------------------------------------ saved by one world, loaded by another


def _save(rank: int, world: int, folder: str, name: str, bf16: bool) -> list[float]:
    model, optimizer = _make(name, bf16)
    _train(model, optimizer, name, range(2), rank)
    dcp.save({"model": model.state_dict()}, checkpoint_id=f"{folder}/in-place")
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=f"{folder}/with-optimizer")
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole = {
        "model": get_model_state_dict(model, options=full),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=full),
    }
    if rank == 0:
        assert all(not hasattr(value, "full_tensor") for value in whole["model"].values())
        torch.save(whole, f"{folder}/whole.pt")
    return _train(model, optimizer, name, range(2, 4), rank)


def _load(rank: int, world: int, folder: str, name: str, bf16: bool, way: str) -> list[float]:
    model, optimizer = _make(name, bf16, seed=9)
    if way == "sharded":
        state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.load(state, checkpoint_id=f"{folder}/with-optimizer")
        options = StateDictOptions()
    else:
        state = {"model": {}, "optimizer": {}}
        everywhere = way == "whole everywhere"
        if rank == 0 or everywhere:
            state = torch.load(f"{folder}/whole.pt", weights_only=False)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=not everywhere)
    set_model_state_dict(model, state["model"], options=options)
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
    return _train(model, optimizer, name, range(2, 4), rank)


def _load_in_place(rank: int, world: int, folder: str, bf16: bool) -> list[float]:
    from odc_triton import publish

    model, _ = _make("qwen2", bf16, seed=9)
    dcp.load({"model": model.state_dict()}, checkpoint_id=f"{folder}/in-place")
    publish(model)
    with torch.no_grad():
        return [CASES["qwen2"].loss(model, batch).item() for batch in microbatches("qwen2", [6, 9], seed=2)]


# How it is loaded: (world, way). torch's whole optimizer state dicts hold a scalar's moments as plain tensors, which no
# optimizer accepts beside a DTensor: a model with a scalar, as "conv" is, takes sharded ones.
@pytest.mark.parametrize(
    ("name", "bf16", "loads"),
    [
        slow("qwen2", False, [(2, "sharded"), (3, "whole everywhere")]),
        ("qwen2", True, [(3, "sharded"), (3, "whole")]),
        ("gpt2-tied", False, [(3, "sharded"), (3, "whole everywhere")]),
        ("conv", False, [(2, "sharded"), (3, "sharded")]),
    ],
)
def test_training_goes_on(tmp_path: Path, name: str, bf16: bool, loads: list[tuple[int, str]]) -> None:
    (want, *_) = ranks.run(_save, 2, str(tmp_path), name, bf16)
    for world, way in loads:
        for losses in ranks.run(_load, world, str(tmp_path), name, bf16, way):
            # Exactly the same state; only the sums over ranks may be taken in another order.
            torch.testing.assert_close(losses, want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("bf16", [False, True])
def test_load_in_place(tmp_path: Path, bf16: bool) -> None:
    (want, *_) = ranks.run(_save, 2, str(tmp_path), "qwen2", bf16)
    tokens = sum(CASES["qwen2"].count(batch) for batch in microbatches("qwen2", [6, 9], seed=2))
    for losses in ranks.run(_load_in_place, 3, str(tmp_path), bf16):
        torch.testing.assert_close(sum(losses) / tokens, want[0], rtol=1e-6, atol=0)


# ------------------------------------------------------------------ from plain FSDP2


def _save_fsdp2(rank: int, world: int, folder: str) -> dict[str, torch.Tensor]:
    model = build("qwen2", seed=4)
    mesh = dist.init_device_mesh("cpu", (world,))
    for block in model.model.layers:
        fsdp.fully_shard(block, mesh=mesh)
    fsdp.fully_shard(model, mesh=mesh)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    return {key: value.full_tensor() for key, value in model.state_dict().items()}


def _load_fsdp2(rank: int, world: int, folder: str, bf16: bool) -> dict[str, torch.Tensor]:
    from odc_triton import full_parameters

    model, _ = _make("qwen2", bf16)
    plain = build("qwen2", seed=4)
    mesh = dist.init_device_mesh("cpu", (world,))
    fsdp.fully_shard(plain, mesh=mesh)
    model.load_state_dict(plain.state_dict())  # DTensors of FSDP2
    first = dict(full_parameters(model))
    dist.barrier()
    state = {"model": model.state_dict()}
    with torch.no_grad():
        for value in state["model"].values():
            value.zero_()
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    second = dict(full_parameters(model))
    assert all(torch.equal(first[key], second[key]) for key in first)
    return first


@pytest.mark.parametrize("bf16", [False, True])
def test_a_checkpoint_of_fsdp2_loads(tmp_path: Path, bf16: bool) -> None:
    (want, *_) = ranks.run(_save_fsdp2, 2, str(tmp_path))
    for got in ranks.run(_load_fsdp2, 3, str(tmp_path), bf16):
        assert got.keys() == want.keys()
        for key, value in want.items():
            torch.testing.assert_close(got[key], value.to(got[key].dtype), rtol=0, atol=0)


# ------------------------------------------------------------------ clipping and optimizers


def _clipped(model: nn.Module, norm_type: float) -> list[nn.Parameter]:
    """All, but for the maximum norm: torch has none of an empty tensor, nor then of a shard without rows."""
    parameters = list(model.parameters())
    return [p for p in parameters if norm_type < float("inf") or (p.dim() and p.shape[0] >= 3)]


def _clip(rank: int, world: int, norm_type: float, foreach: bool, kind: str) -> tuple[float, float, dict]:
    from odc_triton import full_parameters, minibatch

    model, _ = _make("conv", bf16=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=kind == "foreach", fused=kind == "fused")
    for step in range(2):
        with minibatch(model, tokens=1):
            for batch in microbatches("conv", [4, 5, 2], seed=step)[rank::world]:
                CASES["conv"].loss(model, batch).backward()
        clipped = _clipped(model, norm_type)
        norm = nn.utils.clip_grad_norm_(clipped, 0.05, norm_type=norm_type, foreach=foreach)
        after = nn.utils.get_total_norm([p.grad for p in clipped], norm_type=norm_type)
        optimizer.step()
    return norm.full_tensor().item(), after.full_tensor().item(), dict(full_parameters(model))


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize(("norm_type", "foreach"), [(2.0, True), (2.0, False), (float("inf"), True), (1.0, None)])
def test_clip_grad_norm(world: int, norm_type: float, foreach: bool) -> None:
    """A scalar, an empty parameter and one with fewer rows than ranks are among them."""
    kind = {2.0: "foreach", float("inf"): "fused", 1.0: "plain"}[norm_type]
    model = build("conv")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        optimizer.zero_grad()
        for batch in microbatches("conv", [4, 5, 2], seed=step):
            CASES["conv"].loss(model, batch).backward()
        clipped = _clipped(model, norm_type)
        norm = nn.utils.clip_grad_norm_(clipped, 0.05, norm_type=norm_type).item()
        after = nn.utils.get_total_norm([p.grad for p in clipped], norm_type=norm_type).item()
        optimizer.step()
    for got, got_after, weights in ranks.run(_clip, world, norm_type, foreach, kind):
        # fp32 sums in another order.
        torch.testing.assert_close(got, norm, rtol=1e-4, atol=0)
        torch.testing.assert_close(got_after, after, rtol=1e-4, atol=0)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-4, atol=1e-6)
