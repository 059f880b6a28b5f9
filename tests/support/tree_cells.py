"""One minibatch of trees over three ranks, and of the same samples, whole, by plain torch and transformers on one
process: the loss, log-probabilities, and gradients.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from odc_triton import enable_split, fully_shard, minibatch
from odc_triton.balance import PackedDataset, count_target_tokens, pack_collate
from odc_triton.hf import enable_packing
from odc_triton.packs.loss import predictions
from odc_triton.plan.entries import Segment
from odc_triton.plan.fields import IGNORED
from odc_triton.plan.plan import Plan
from tests.sequence.test_branches import in_own_dtype
from tests.support.families import causal_lm
from tests.support.parity import TRANSFORMS
from tests.support.relatives import dealt
from tests.support.replicas import mesh_of
from tests.support.splitting import gradients

WORLD, ROOM = 3, 128


@dataclass(frozen=True, kw_only=True)
class Cell:
    """`change`: as in TRANSFORMS."""

    shape: str
    deal: str
    family: str = "Qwen2"
    change: str = "none"
    dtype: torch.dtype = torch.float64
    backend: str = "cpu"
    replicas: int = 1

    def __str__(self) -> str:
        return ", ".join(map(str, astuple(self)))


@dataclass(kw_only=True)
class Found:
    """`logps`: by sample, of its learned tokens; one rank's are parts, (first token, values)."""

    loss: float
    targets: int
    logps: dict[int, Any]
    gradients: dict[str, Tensor]


def build(cell: Cell, *, plain: bool = False) -> nn.Module:
    """Weights are large enough that attention is far from uniform. `plain`: with transformers' own attention."""
    torch.manual_seed(0)
    attention = "sdpa" if plain and cell.family not in ("Gemma2", "GptOss") else "eager"  # they have no SDPA
    model = in_own_dtype(causal_lm(cell.family, attention=attention, spread=0.1).to(cell.dtype))
    model = TRANSFORMS[cell.change](model)
    if not plain:
        enable_packing(model)
    return model


def log_probs(logits: Tensor, targets: Tensor) -> Tensor:
    """In the model's dtype."""
    return -F.cross_entropy(logits, targets, reduction="none")


def dense(cell: Cell) -> Found:
    """By unsplit samples, one after another."""
    torch.set_num_threads(1)
    samples, _ = dealt(cell.shape, cell.deal)
    model = build(cell, plain=True)
    targets, total, logps = sum(len(each.ids) - each.learned for each in samples), 0.0, {}
    for at, sample in enumerate(samples):
        ids = torch.tensor(sample.ids)
        logits = model(input_ids=ids[None], use_cache=False).logits[0, sample.learned - 1 : -1]
        logp = log_probs(logits, ids[sample.learned :])
        loss = -logp.sum() / targets
        loss.backward()
        total += loss.item()
        logps[at] = logp.detach()
    return Found(loss=total, targets=targets, logps=logps, gradients=gradients(model))


def on_ranks(rank: int, world: int, cell: Cell) -> Found:
    """This rank's part of the loss and of the log-probabilities; the targets and, from rank 0, gradients of all."""
    samples, deal = dealt(cell.shape, cell.deal)
    rows = [
        {"input_ids": list(each.ids), "labels": [IGNORED] * each.learned + list(each.ids[each.learned :])}
        for each in samples
    ]
    entries = Plan.by_hand(deal, replicas=cell.replicas).packs(rank)
    packs = pack_collate(PackedDataset(rows).__getitems__(entries))
    mesh = mesh_of((cell.replicas, dist.get_world_size() // cell.replicas)) if cell.replicas > 1 else None
    model = fully_shard(build(cell), backend=cell.backend, mesh=mesh)
    enable_split(model, tokens=ROOM)
    total = 0.0
    logps: dict[int, list[tuple[int, Tensor]]] = {}
    with minibatch(model, tokens=count_target_tokens(packs), split=packs.split) as mb:
        for pack, of_pack in zip(packs, entries, strict=True):
            logp = log_probs(*predictions(model, pack))
            loss = -logp.sum() / mb.tokens
            loss.backward()
            total += loss.item()
            for entry in of_pack:
                sample = entry.sample if isinstance(entry, Segment) else entry
                start, stop = (entry.start, entry.stop) if isinstance(entry, Segment) else (0, len(samples[sample].ids))
                # Each token predicts the next one.
                first, last = max(start + 1, samples[sample].learned), min(stop + 1, len(samples[sample].ids))
                own, logp = logp.detach().split([max(last - first, 0), len(logp) - max(last - first, 0)])
                logps.setdefault(sample, []).append((first, own))
        targets = mb.tokens
    found = gradients(model)
    return Found(loss=total, targets=targets, logps=logps, gradients=found if rank == 0 else {})


def joined(of_ranks: list[Found]) -> Found:
    """What all ranks found."""
    parts: dict[int, list[tuple[int, Tensor]]] = {}
    for each in of_ranks:
        for sample, some in each.logps.items():
            parts.setdefault(sample, []).extend(some)
    logps = {
        sample: torch.cat([values for _, values in sorted(some, key=lambda part: (part[0], len(part[1])))])
        for sample, some in parts.items()
    }
    return replace(of_ranks[0], loss=sum(each.loss for each in of_ranks), logps=logps)
