"""Training on a mesh of replicas, as run by a test's ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.support.models import CASES, build, microbatches
from tests.support.parity import DEALS, SIZES

NAMES = ("replicate", "shard")
STEPS = 6  # one rank evaluates after the fifth


def mesh_of(shape: tuple[int, ...]) -> Any:
    names = NAMES if len(shape) == 2 else ("shard",)
    return dist.init_device_mesh("cpu", shape, mesh_dim_names=names)


def _train(
    rank: int, world: int, shape: tuple[int, ...], name: str, backend: str, style: str = "root", steps: int = STEPS
) -> tuple:
    from odc_triton import full_parameters, fully_shard, minibatch

    case, model, mesh = CASES[name], build(name, seed=0 if rank == 0 else 7), mesh_of(shape)
    if style == "bottom-up":
        for block in model.model.layers:
            fully_shard(block, mesh=mesh, backend=backend)
    fully_shard(model, mesh=mesh, backend=backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first, norms, losses = {}, [], []
    for step in range(steps):
        batches = microbatches(name, SIZES, seed=step)
        mine = [batches[index] for index in DEALS[world][rank]]
        total = torch.zeros(())
        with minibatch(model, tokens=sum(case.count(batch) for batch in mine)) as mb:
            for batch in mine:
                loss = case.loss(model, batch) / mb.tokens
                loss.backward()
                total += loss.detach()
        dist.all_reduce(total)
        losses.append(total.item())
        if step == 0:
            first = {key: p.grad.full_tensor().clone() for key, p in model.named_parameters() if p.grad is not None}
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor().item())
        optimizer.step()
        if step == 4 and rank == 1:  # one rank alone evaluates right after its step
            with torch.no_grad():
                case.loss(model, batches[0])
    local = sum(p.to_local().numel() for p in model.parameters())
    states = [value for state in optimizer.state.values() for value in state.values()]
    state_bytes = sum((s.to_local() if hasattr(s, "to_local") else s).nbytes for s in states)
    return first, dict(full_parameters(model)), norms, losses, (local, state_bytes)


class Rows(nn.Module):
    """7, 1, 2 and no rows over 2 x 2 ranks; one frozen; one unused; a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.seven, self.one, self.two = nn.Linear(4, 7), nn.Linear(7, 1), nn.Linear(7, 2)
        self.empty = nn.Parameter(torch.empty(0, 2))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.frozen, self.never = nn.Linear(4, 4), nn.Linear(3, 3)
        self.frozen.requires_grad_(False)
        self.register_buffer("offset", torch.ones(4))

    def reset_parameters(self) -> None:
        """Resets its own tensors; children reset theirs."""
        nn.init.constant_(self.scale, 2.0)
        nn.init.ones_(self.offset)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.seven(self.frozen(x + self.offset.to(x.dtype))))
        return (self.one(x).sum() + self.two(x).sum() + self.empty.sum()) * self.scale
