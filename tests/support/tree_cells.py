"""One minibatch of trees over three ranks, and of the same samples, whole, by plain torch and transformers on one
process: the loss, log-probabilities, and gradients.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from odc_triton import enable_split, fully_shard, minibatch
from odc_triton.balance import PackedDataset, count_target_tokens, pack_collate
from odc_triton.balance.pieces import Entry, MinibatchPacks, Piece, SplitPlan
from odc_triton.data.records import IGNORED
from odc_triton.hf import enable_packing
from odc_triton.hf.loss import predictions
from odc_triton.hf.reference import Reference
from odc_triton.nn.head import TokenLogProbs
from odc_triton.rl import learned
from odc_triton.rl.importance import Importance
from odc_triton.rl.learned import Learned
from odc_triton.rl.objective import LearningRule, Objective
from odc_triton.sequence.sums import SampleSums
from tests.sequence.test_branches import in_own_dtype
from tests.support.families import causal_lm
from tests.support.parity import TRANSFORMS
from tests.support.relatives import Sample, dealt
from tests.support.replicas import mesh_of
from tests.support.splitting import gradients

WORLD, ROOM = 3, 128
CLIP, LARGEST_RATIO, KL, LARGEST_WEIGHT = 0.2, 1.2, 0.3, 1.1


@dataclass(frozen=True, kw_only=True)
class Cell:
    """`change`: as in TRANSFORMS; `importance`: a mode of `Importance`, not with "sft"."""

    shape: str = "a group"
    deal: str = "here and there"
    family: str = "Qwen2"
    change: str = "none"
    loss: str = "sft"
    importance: str = "none"
    dtype: torch.dtype = torch.float64
    backend: str = "cpu"
    replicas: int = 1

    def __str__(self) -> str:
        return ", ".join(map(str, astuple(self)))


@dataclass(kw_only=True)
class Found:
    """`logps`: by sample, of its learned tokens; one rank's are parts, (first token, values). `sums`: for the log."""

    loss: float
    targets: int
    logps: dict[int, Any]
    sums: dict[str, float]
    gradients: dict[str, Tensor]


def build(cell: Cell, *, seed: int = 0, plain: bool = False) -> nn.Module:
    """Weights are large enough that attention is far from uniform. `plain`: with transformers' own attention."""
    torch.manual_seed(seed)
    attention = "sdpa" if plain and cell.family not in ("Gemma2", "GptOss") else "eager"  # they have no SDPA
    model = in_own_dtype(causal_lm(cell.family, attention=attention, spread=0.1).to(cell.dtype))
    model = TRANSFORMS[cell.change](model)
    if not plain:
        enable_packing(model)
    return model


def own_log_probs(logits: Tensor, targets: Tensor) -> TokenLogProbs:
    """As `log_probs`, which computes them in fp32 whatever the logits are."""
    every = (logits if logits.dtype == torch.float64 else logits.float()).log_softmax(-1)
    return TokenLogProbs(logp=every.gather(-1, targets[:, None])[:, 0], entropy=-(every.exp() * every).sum(-1))


@functools.cache
def completions(cell: Cell) -> tuple[list[Sample], list[float], list[Tensor], list[Tensor]]:
    """The samples; of each its advantage and the log-probabilities before: near those of 97 equally likely tokens, and
    those under another engine that sampled.
    """
    samples, _ = dealt(cell.shape, cell.deal)
    generator = torch.Generator().manual_seed(5)
    noise = [torch.randn(len(each.ids) - each.learned, generator=generator, dtype=cell.dtype) for each in samples]
    advantage = [(-1) ** at * (0.5 + 0.25 * at) for at in range(len(samples))]
    old = [0.5 * each - math.log(97) for each in noise]
    theirs = [each + 0.2 * torch.randn(len(each), generator=generator, dtype=cell.dtype) for each in old]
    theirs[0][1] = math.nan
    return samples, advantage, old, theirs


# ------------------------------------------------------------------ plain torch


def dense(cell: Cell) -> Found:
    """By whole samples, one after another."""
    torch.set_num_threads(1)
    samples, advantage, old, theirs = completions(cell)
    model = build(cell, plain=True)
    reference = build(cell, seed=1, plain=True) if cell.loss == "kl" else None
    targets = sum(len(each) for each in old)
    total, logps, sums = 0.0, {}, Counter()
    for at, sample in enumerate(samples):
        logp = _plain_log_probs(model, cell, sample)
        if cell.loss == "sft":
            loss = -logp.sum() / targets
        else:
            behind = None
            if reference is not None:
                with torch.no_grad():
                    behind = _plain_log_probs(reference, cell, sample)
            then = old[at].to(logp.dtype)
            weights = _plain_weights(cell.importance, then, theirs[at].to(logp.dtype))
            terms, ratio = _plain_terms(cell.loss, logp, then, advantage[at], weights, behind)
            low, high = (0, LARGEST_RATIO) if cell.loss == "cispo" else (1 - CLIP, 1 + CLIP)
            clipped = ratio > high if advantage[at] > 0 else (ratio < low)
            sums.update({"ratio": ratio.sum().item(), "clipped": clipped.sum().item()})
            if cell.importance != "none":
                sums.update({"mismatch": (then - theirs[at]).nan_to_num(0.0).exp().sum().item()})
            loss = terms.mean() / len(samples) if cell.loss in ("grpo", "gspo") else terms.sum() / targets
        loss.backward()
        total += loss.item()
        logps[at] = logp.detach()
    return Found(loss=total, targets=targets, logps=logps, sums=dict(sums), gradients=gradients(model))


def _plain_log_probs(model: nn.Module, cell: Cell, sample: Sample) -> Tensor:
    ids = torch.tensor(sample.ids)
    logits = model(input_ids=ids[None], use_cache=False).logits[0, sample.learned - 1 : -1]
    return own_log_probs(logits, ids[sample.learned :]).logp


def _plain_weights(importance: str, old: Tensor, theirs: Tensor) -> Tensor | float:
    if importance == "none":
        return 1.0
    apart = (old - theirs).nan_to_num(0.0)
    ratio = (apart.sum().expand(len(apart)) if importance.startswith("sequence") else apart).exp()
    bounded = torch.full_like(ratio, LARGEST_WEIGHT if importance.endswith("truncate") else 0.0)
    return torch.where(ratio > LARGEST_WEIGHT, bounded, ratio)


def _plain_terms(
    loss: str, logp: Tensor, old: Tensor, advantage: float, weights: Tensor | float, behind: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Of a completion's tokens, as in TRL; and their ratios."""
    ratio = (logp - old).exp()
    if loss == "gspo":
        ratio = (logp - old).mean().exp().expand(len(logp))
    if loss == "cispo":
        terms = -ratio.clamp(max=LARGEST_RATIO).detach() * advantage * logp
    else:
        terms = -torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
    terms = terms * weights
    if behind is not None:
        terms = terms + KL * ((behind - logp).exp() - (behind - logp) - 1)
    return terms, ratio.detach()


# ------------------------------------------------------------------ on ranks


class _LogProbs:
    """In place of `learned.log_probs`: in the model's dtype. `found`: the policy's, by pack."""

    def __init__(self) -> None:
        self.found: list[Tensor] = []

    def __call__(self, logits: Tensor, targets: Tensor) -> TokenLogProbs:
        made = own_log_probs(logits, targets)
        if torch.is_grad_enabled():  # else the reference's
            self.found.append(made.logp.detach())
        return made


def on_ranks(rank: int, world: int, cell: Cell) -> Found:
    """This rank's part of the loss and of the log-probabilities; the targets and, from rank 0, gradients of all."""
    samples, advantage, old, theirs = completions(cell)
    _, deal = dealt(cell.shape, cell.deal)
    rows = [
        {"input_ids": list(each.ids), "labels": [IGNORED] * each.learned + list(each.ids[each.learned :])}
        for each in samples
    ]
    entries = MinibatchPacks.of(deal[rank], SplitPlan.of(deal, replicas=cell.replicas))
    packs = pack_collate(PackedDataset(rows).__getitems__(entries))
    kind = "dapo" if cell.loss in ("sft", "kl") else cell.loss
    rule = LearningRule(loss=kind, rows=len(rows), most_tokens=1, keep_all=True)
    batch = Learned(
        rule=rule,
        samples=dict(enumerate(rows)),
        advantage=dict(enumerate(advantage)),
        weight={at: rule.weight(len(each)) for at, each in enumerate(old)},
        sampled={at: each.tolist() for at, each in enumerate(theirs)},
        tokens=sum(map(len, old)),
    )
    for entry in itertools.chain.from_iterable(entries):
        batch.old[entry] = old[_sample(entry)][batch._predicted(entry)]
    model, reference = sharded(cell), None
    log_probs = learned.log_probs = _LogProbs()
    if cell.loss == "kl":
        reference = Reference(sharded(cell, seed=1), model)
    objective = Objective(
        loss=kind,
        low=CLIP,
        high=LARGEST_RATIO if kind == "cispo" else CLIP,
        kl=KL if cell.loss == "kl" else 0.0,
    )
    correction = Importance(mode=cell.importance, most=LARGEST_WEIGHT) if cell.importance != "none" else None
    how = {"reference": reference, "objective": objective, "temperature": 1.0, "correction": correction}
    how["pieces"] = SampleSums(model, samples=len(rows))
    total, sums = 0.0, Counter()
    with minibatch(model, tokens=count_target_tokens(packs), split=packs.split) as mb:
        for pack, of_pack in zip(packs, entries, strict=True):
            if cell.loss == "sft":
                loss = -log_probs(*predictions(model, pack)).logp.sum() / mb.tokens
            else:
                loss, more = batch.loss(of_pack, model=model, device=torch.device("cpu"), **how)
                loss = loss / batch.divisor
                sums.update({name: more[name].item() for name in ("ratio", "clipped", "mismatch") if name in more})
            loss.backward()
            total += loss.item()
        targets = mb.tokens
    logps: dict[int, list[tuple[int, Tensor]]] = {}
    for of_pack, found in zip(entries, log_probs.found, strict=True):
        parts = [batch._predicted(entry) for entry in of_pack]
        for entry, part, values in zip(of_pack, parts, found.split([p.stop - p.start for p in parts]), strict=True):
            logps.setdefault(_sample(entry), []).append((part.start, values))
    found = gradients(model)
    found = found if rank == 0 else {}
    return Found(loss=total, targets=targets, logps=logps, sums=dict(sums), gradients=found)


def _sample(entry: Entry) -> int:
    return entry.sample if isinstance(entry, Piece) else entry


def sharded(cell: Cell, seed: int = 0) -> nn.Module:
    mesh = mesh_of((cell.replicas, dist.get_world_size() // cell.replicas)) if cell.replicas > 1 else None
    model = fully_shard(build(cell, seed=seed), backend=cell.backend, mesh=mesh)
    enable_split(model, tokens=ROOM)
    return model


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
    sums = Counter()
    for each in of_ranks:
        sums.update(each.sums)
    return replace(of_ranks[0], loss=sum(each.loss for each in of_ranks), logps=logps, sums=dict(sums))
