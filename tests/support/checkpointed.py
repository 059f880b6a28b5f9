"""A small model and its training, the same on any number of ranks, for tests of checkpoints."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

from odc_triton import MixedPrecisionPolicy, fully_shard, minibatch
from odc_triton.engine.api import engine_of
from odc_triton.jobs.checkpoints.background import BackgroundCheckpoints
from tests.support.models import ALL_CASES, build, microbatches

Whole = dict[str, Any]


def make(name: str, bf16: bool, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = fully_shard(build(name, seed), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16 if bf16 else None))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, name: str, steps: range, *, noise: bool = False
) -> list[float]:
    """Losses of whole minibatches, with the same samples for any world. `noise`: random numbers scale each loss."""
    case, losses, rank, world = ALL_CASES[name], [], dist.get_rank(), dist.get_world_size()
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + step)  # a schedule
        mine = microbatches(name, [6, 9, 4], seed=step)[rank::world]
        total = torch.zeros(())
        with minibatch(model, tokens=sum(case.count(batch) for batch in mine)) as mb:
            for batch in mine:
                loss = case.loss(model, batch) / mb.tokens
                if noise:
                    loss = loss * (1 + torch.rand(()) + random.random())
                loss.backward()
                total += loss.detach().float()
        dist.all_reduce(total)
        losses.append(total.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> Whole:
    """Copies of all parameters, states and hyperparameters."""
    states = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
    found = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    found |= get_optimizer_state_dict(model, optimizer, options=states)
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in found.items()}


def assert_same(got: Whole, want: Whole, **tolerance: float) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(got[name], value, **tolerance)
        elif isinstance(value, tuple):  # torch's whole ones make it a list
            assert tuple(got[name]) == value, name
        else:
            assert got[name] == value, name


def settle(background: BackgroundCheckpoints, model: nn.Module) -> None:
    """What a training loop does at its barrier."""
    messages = engine_of(model).exchange("a step", {"checkpoint": background.report()})
    background.settle([each["checkpoint"] for each in messages])


def writers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "checkpoint"]


def unfinished(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".step")]
