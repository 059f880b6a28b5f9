"""A loop of one's own under either engine, saved and loaded by torch's distributed checkpoints: parameters and states
have the same bits on any number of ranks, and so have the next steps on one rank, where the order of sums is fixed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)

from tests.support import ranks
from tests.support.checkpointed import train
from tests.support.models import build

Whole = dict[str, Any]


def _whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> Whole:
    """Copies of all parameters, states and hyperparameters."""
    states = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    whole |= get_optimizer_state_dict(model, optimizer, options=states)
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in whole.items()}


def _tensors(whole: Whole) -> dict[str, torch.Tensor]:
    return {name: value for name, value in whole.items() if isinstance(value, torch.Tensor)}


def _run(rank: int, world: int, engine: str, name: str, folder: Path, loads: bool) -> tuple[Whole, list[float], Whole]:
    """What there is at step 2, the losses of the next two steps, what there is then."""
    from torch.distributed import fsdp

    import odc_triton

    model = build(name, seed=9 if loads else 0)
    if engine == "use_odc":
        for block in model.model.layers:
            fsdp.fully_shard(block)
        odc_triton.use_odc(fsdp.fully_shard(model))
    else:
        model = odc_triton.fully_shard(model)
    # Its epsilon keeps AdamW from making much of gradients that are nearly rounding.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    if not loads:
        train(model, optimizer, name, range(2))
    weights, states = get_state_dict(model, optimizer)
    if loads:
        dcp.load({"model": weights, "optimizer": states}, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    else:
        dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder)
    there = _whole(model, optimizer)
    return there, train(model, optimizer, name, range(2, 4)), _whole(model, optimizer)


@pytest.mark.parametrize(
    ("engine", "name", "worlds"),
    [
        ("fully_shard", "conv", (3, 1)),  # a scalar, an empty parameter, fewer rows than ranks
        ("use_odc", "qwen2", (2, 3)),
        ("use_odc", "qwen2", (1, 1)),
    ],
)
def test_a_loop_resumes(tmp_path: Path, engine: str, name: str, worlds: tuple[int, int]) -> None:
    (saved, want, after), *_ = ranks.run(_run, worlds[0], engine, name, tmp_path, False)
    assert any(key.endswith(".exp_avg_sq") for key in saved)
    # fp32 sums over ranks in the order of their arrival; on one rank all bits are the same.
    tolerance = {"rtol": 0, "atol": 0} if worlds == (1, 1) else {"rtol": 1e-5, "atol": 1e-6}
    for loaded, losses, its in ranks.run(_run, worlds[1], engine, name, tmp_path, True):
        torch.testing.assert_close(_tensors(loaded), _tensors(saved), rtol=0, atol=0)
        assert {key: value for key, value in loaded.items() if not isinstance(value, torch.Tensor)} == {
            key: value for key, value in saved.items() if not isinstance(value, torch.Tensor)
        }
        torch.testing.assert_close(losses, want, **tolerance)
        torch.testing.assert_close(_tensors(its), _tensors(after), **tolerance)
