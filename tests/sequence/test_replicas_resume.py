"""Training with split sequences goes on from a checkpoint on other numbers of replicas and ranks, by AdamW and Muon."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from odc_triton import full_parameters
from odc_triton.balance import count_target_tokens, pack_collate
from odc_triton.checkpoint.steps import Checkpoints
from odc_triton.hf import summed_loss
from odc_triton.optim import ChainedOptimizer, Muon
from tests.support import ranks
from tests.support.parity import whole_model_error
from tests.support.splitting import DEALS, Setup, build, samples, sharded, step_on

Weights = dict[str, torch.Tensor]
SAVED, STEPS = 2, 4
# Of how far all weights together move. Muon makes directions in which a gradient is all but zero as large as others,
# in bf16, so it makes the last bits of gradients, which are summed in another order, into hundredths.
LIMITS = {"AdamW": 1e-4, "Muon": 0.04}
SETUPS = [
    Setup(deal="2x2", replicas=2),
    Setup(deal="3x2", replicas=3, backend="cpu-sharded"),
    Setup(deal="2x3", replicas=2),
    Setup(deal="two"),
]


def _optimizer(model: nn.Module, kind: str, muon: type[torch.optim.Optimizer] = Muon) -> torch.optim.Optimizer:
    if kind == "AdamW":
        return torch.optim.AdamW(model.parameters(), lr=1e-3)
    of_blocks = {name: p for name, p in model.named_parameters() if p.ndim == 2 and ".layers." in name}
    others = [p for name, p in model.named_parameters() if name not in of_blocks]
    return ChainedOptimizer(muon(list(of_blocks.values()), lr=0.02), torch.optim.AdamW(others, lr=1e-3))


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, setup: Setup, rank: int, steps: range) -> None:
    for step in steps:
        step_on(model, setup, rank, step)
        optimizer.step()
        optimizer.zero_grad()


def _save(rank: int, world: int, setup: Setup, kind: str, folder: Path) -> Weights:
    model = sharded(setup, rank)
    optimizer = _optimizer(model, kind)
    _train(model, optimizer, setup, rank, range(SAVED))
    Checkpoints(folder, keep=1).save(model=model, optimizer=optimizer, state={}, step=SAVED)
    _train(model, optimizer, setup, rank, range(SAVED, STEPS))
    return dict(full_parameters(model))


def _resume(rank: int, world: int, setup: Setup, kind: str, folder: Path) -> Weights:
    model = sharded(setup, rank)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    optimizer, checkpoints = _optimizer(model, kind), Checkpoints(folder, keep=1)
    checkpoints.load(checkpoints.newest(), model=model, optimizer=optimizer)
    _train(model, optimizer, setup, rank, range(SAVED, STEPS))
    return dict(full_parameters(model))


def _plain(kind: str) -> Weights:
    torch.set_num_threads(1)
    model = build(Setup(), replaced=False)
    optimizer = _optimizer(model, kind, torch.optim.Muon)
    for step in range(STEPS):
        packs = pack_collate([[each] for each in samples(Setup(), step)])
        tokens = count_target_tokens(packs)
        for pack in packs:
            (summed_loss(model, pack) / tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.slow
def test_on_other_replicas(tmp_path: Path) -> None:
    first = SETUPS[0]
    start = {name: p.detach() for name, p in build(first, replaced=False).named_parameters()}
    folders = {kind: tmp_path / kind for kind in LIMITS}
    saved = ranks.run_all(4, *((_save, first, kind, folder) for kind, folder in folders.items()))
    for setup in SETUPS:
        world = len(DEALS[setup.deal])
        resumed = ranks.run_all(world, *((_resume, setup, kind, folder) for kind, folder in folders.items()))
        for kind, went_on, of_ranks in zip(folders, saved, resumed, strict=True):
            want = _plain(kind)
            moved = {name: weight - start[name] for name, weight in want.items()}
            for got in (*went_on, *of_ranks):
                off = whole_model_error({name: got[name] - start[name] for name in moved}, moved)
                assert off <= LIMITS[kind], (kind, setup)
