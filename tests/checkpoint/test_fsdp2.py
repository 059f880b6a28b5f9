"""Checkpoints of FSDP2's scripts (torch.distributed.checkpoint, model and AdamW) load here and ours load there."""

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

from odc_triton import full_parameters
from odc_triton.jobs.checkpoints.steps import Checkpoints
from tests.support import ranks
from tests.support.checkpointed import Whole, assert_same, make, train, whole
from tests.support.models import CASES, build, microbatches

SAVED_AT = 2
# As scripts nest them, and with torch's flattened optimizer states.
LAYOUTS = {"plain": ("model", "optimizer", False), "torchtitan": ("app.model", "app.optim", True)}


def _fsdp2(name: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build(name, seed)
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.model.layers:
        fsdp.fully_shard(block, mesh=mesh)
    model = fsdp.fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def _step_fsdp2(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(SAVED_AT):
        optimizer.param_groups[0]["lr"] = 1e-2 / (1 + step)
        for parameter in model.parameters():
            parameter.grad = parameter.detach() * (1 + step)
        optimizer.step()


def _save_theirs(rank: int, world: int, folder: Path, name: str, layout: str) -> Whole:
    at_model, at_optimizer, flat = LAYOUTS[layout]
    model, optimizer = _fsdp2(name, 0)
    _step_fsdp2(model, optimizer)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    theirs = get_optimizer_state_dict(model, optimizer, options=options)
    if at_model.startswith("app."):
        state = {"app": {"model": get_model_state_dict(model), "optim": theirs}}
    else:
        state = {at_model: get_model_state_dict(model), at_optimizer: theirs}
    dcp.save(state, checkpoint_id=folder)
    return whole(model, optimizer)


def _load_ours(rank: int, world: int, folder: Path, name: str) -> Whole:
    model, optimizer = make(name, bf16=False, seed=9)
    assert Checkpoints(folder.parent / "mine", keep=1).load(folder, model=model, optimizer=optimizer) == {}
    return whole(model, optimizer)


def _save_ours(rank: int, world: int, folder: Path, name: str) -> Whole:
    model, optimizer = make(name, bf16=False)
    train(model, optimizer, name, range(SAVED_AT))
    Checkpoints(folder, keep=1).save(model=model, optimizer=optimizer, state={}, step=SAVED_AT)
    return whole(model, optimizer)


def _load_theirs(rank: int, world: int, folder: Path, name: str) -> Whole:
    model, optimizer = _fsdp2(name, 9)
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=folder / f"step-{SAVED_AT:08d}")
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    return whole(model, optimizer)


@pytest.mark.parametrize(("layout", "worlds"), [("plain", (2, 1)), ("torchtitan", (1, 2))])
def test_theirs_here(tmp_path: Path, layout: str, worlds: tuple[int, int]) -> None:
    (want, *_) = ranks.run(_save_theirs, worlds[0], tmp_path / "theirs", "qwen2", layout)
    for got in ranks.run(_load_ours, worlds[1], tmp_path / "theirs", "qwen2"):
        assert_same(got, want, rtol=0, atol=0)


def test_ours_there(tmp_path: Path) -> None:
    """In FSDP2, and as one file by torch's own converter."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    (want, *_) = ranks.run(_save_ours, 2, tmp_path, "qwen2")
    for got in ranks.run(_load_theirs, 1, tmp_path, "qwen2"):
        assert_same(got, want, rtol=0, atol=0)
    dcp_to_torch_save(tmp_path / f"step-{SAVED_AT:08d}", tmp_path / "one.pt")
    whole = torch.load(tmp_path / "one.pt", weights_only=True)
    assert whole["model"]["lm_head.weight"].shape == (97, 32)
    assert whole["optimizer"]["state"]["lm_head.weight"]["exp_avg"].shape == (97, 32)
    assert whole["optimizer"]["param_groups"][0]["params"][0] == "model.embed_tokens.weight"


def _load_a_scalar(rank: int, world: int, folder: Path) -> tuple[dict, torch.Tensor]:
    model, optimizer = make("conv", False, seed=9)
    Checkpoints(folder.parent / "mine", keep=1).load(folder, model=model, optimizer=optimizer)
    return dict(full_parameters(model)), optimizer.state[model.temperature]["exp_avg"].full_tensor()


@pytest.mark.filterwarnings("ignore:torch.distributed is .*:UserWarning")
def test_a_scalar_that_was_saved_whole(tmp_path: Path) -> None:
    """As plain torch saves it, and as we did before scalars were sharded."""
    model = build("conv")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    CASES["conv"].loss(model, microbatches("conv", [4], seed=0)[0]).backward()
    optimizer.step()
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    assert state["model"]["temperature"].shape == ()
    dcp.save(state, checkpoint_id=tmp_path / "plain", no_dist=True)
    for weights, momentum in ranks.run(_load_a_scalar, 2, tmp_path / "plain"):
        torch.testing.assert_close(weights, dict(model.named_parameters()), rtol=0, atol=0)
        assert momentum.item() == optimizer.state[model.temperature]["exp_avg"].item() != 0
