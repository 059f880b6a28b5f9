"""Optimizers, clipping and torch.distributed.checkpoint on the sharded parameters, as they are.

Sharded optimizer states are those of test_own_loop.
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
    set_model_state_dict,
    set_optimizer_state_dict,
)

from tests.support import ranks
from tests.support.checkpointed import make, train
from tests.support.models import CASES, build, microbatches

# ------------------------------------------------------------------ saved by one world, loaded by another


def _save(rank: int, world: int, folder: Path, name: str, bf16: bool) -> list[float]:
    """Saves the model's shards, and whole state dicts of all. Returns the losses of the steps after it."""
    model, optimizer = make(name, bf16)
    train(model, optimizer, name, range(2))
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder / "shards")
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole = {
        "model": get_model_state_dict(model, options=full),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=full),
    }
    if rank == 0:
        assert all(not hasattr(value, "full_tensor") for value in whole["model"].values())
        torch.save(whole, folder / "whole.pt")
    return train(model, optimizer, name, range(2, 4))


def _load(rank: int, world: int, folder: Path, name: str, bf16: bool) -> dict[str, list[float]]:
    """The losses of the same steps, by how the model was loaded: by its shards in place, or whole."""
    from odc_triton import publish

    found = {}
    for way in ("in place", "whole on rank 0", "whole everywhere"):
        model, optimizer = make(name, bf16, seed=9)
        everywhere = way != "whole on rank 0"
        here = rank == 0 or everywhere
        state = torch.load(folder / "whole.pt", weights_only=False) if here else {"model": {}, "optimizer": {}}
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=not everywhere)
        if way == "in place":
            dcp.load({"model": model.state_dict()}, checkpoint_id=folder / "shards")
            publish(model)
        else:
            set_model_state_dict(model, state["model"], options=options)
        set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
        found[way] = train(model, optimizer, name, range(2, 4))
    return found


@pytest.mark.parametrize(("name", "bf16"), [("qwen2", True), ("gpt2-tied", False)])
def test_training_goes_on(tmp_path: Path, name: str, bf16: bool) -> None:
    (want, *_) = ranks.run(_save, 2, tmp_path, name, bf16)
    for found in ranks.run(_load, 3, tmp_path, name, bf16):
        for way, losses in found.items():
            # Exactly the same state; only the sums over ranks may be taken in another order.
            assert losses == pytest.approx(want, rel=1e-5), way


def _load_fsdp2(rank: int, world: int) -> dict[str, torch.Tensor]:
    from odc_triton import full_parameters

    model, _ = make("qwen2", bf16=True)
    plain = build("qwen2", seed=4)
    fsdp.fully_shard(plain, mesh=dist.init_device_mesh("cpu", (world,)))
    model.load_state_dict(plain.state_dict())
    return dict(full_parameters(model))


def test_a_state_dict_of_fsdp2_loads() -> None:
    want = build("qwen2", seed=4)
    for got in ranks.run(_load_fsdp2, 3):
        for name, value in want.named_parameters():
            assert torch.equal(got[name], value.detach().to(got[name].dtype)), name


# ------------------------------------------------------------------ clipping and optimizers


def _clipped(model: nn.Module, norm_type: float) -> list[nn.Parameter]:
    """All, but for the maximum norm: torch has none of an empty tensor, nor then of a shard without rows."""
    parameters = list(model.parameters())
    return [p for p in parameters if norm_type < float("inf") or (p.dim() and p.shape[0] >= 3)]


# The order of the norm, how it is computed, how AdamW steps.
CLIPS = [(2.0, True, "foreach"), (2.0, False, "foreach"), (float("inf"), True, "fused"), (1.0, None, "plain")]


def _clip(rank: int, world: int) -> list[tuple[float, float, dict]]:
    from odc_triton import full_parameters, minibatch

    found = []
    for norm_type, foreach, kind in CLIPS:
        model, _ = make("conv", bf16=False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=kind == "foreach", fused=kind == "fused")
        for step in range(2):
            with minibatch(model, tokens=1):
                for batch in microbatches("conv", [4, 5, 2], seed=step)[rank::world]:
                    CASES["conv"].loss(model, batch).backward()
            clipped = _clipped(model, norm_type)
            norm = nn.utils.clip_grad_norm_(clipped, 0.05, norm_type=norm_type, foreach=foreach)
            after = nn.utils.get_total_norm([p.grad for p in clipped], norm_type=norm_type)
            optimizer.step()
        found.append((norm.full_tensor().item(), after.full_tensor().item(), dict(full_parameters(model))))
    return found


def test_clip_grad_norm() -> None:
    """A scalar, an empty parameter and one with fewer rows than ranks are among them."""
    of_ranks = ranks.run(_clip, 3)
    for place, (norm_type, *_) in enumerate(CLIPS):
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
        for got, got_after, weights in (found[place] for found in of_ranks):
            # fp32 sums in another order.
            torch.testing.assert_close(got, norm, rtol=1e-4, atol=0)
            torch.testing.assert_close(got_after, after, rtol=1e-4, atol=0)
            for name, parameter in model.named_parameters():
                torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-4, atol=1e-6)
