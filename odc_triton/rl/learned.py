"""The learned completions of a rollout, with their advantages and weights, and the loss of a pack of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn

from ..balance.collate import Pack, PackedDataset, pack_collate, to_device
from ..balance.pieces import Entry, number_of
from ..data.records import IGNORED
from ..hf.loss import predictions
from ..nn.head import log_probs
from .objective import Denominators, LossType, Objective, TokenTerms, advantages
from .rollout import Rollout

Correction = Callable[[Tensor, Tensor, Sequence[int]], Tensor]


@dataclass(kw_only=True)
class Learned:
    """A rollout's completions that are learned, the same on every rank except `old`, which has this rank's only.

    By sample: ids and labels, advantage, weight of each token's loss, its tokens' log-probabilities under the engine
    that sampled. Tokens from outside are in the ids alone.
    `tokens`: the loss's denominator, including tokens of completions left out.
    """

    samples: list[dict[str, list[int]]]
    advantage: list[float]
    weight: list[float]
    sampled: list[list[float]]
    tokens: int
    old: dict[Entry, Tensor] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        made: Rollout,
        *,
        loss: LossType,
        scale: Any,
        mask_truncated: bool,
        most_tokens: int,
        keep_all: bool,
    ) -> Learned:
        """`keep_all`: also completions of advantage 0, which are only counted without a divergence."""
        gained = advantages(made.totals, scale).flatten().tolist()
        groups = zip(made.slots, made.sampled, strict=True)
        flat = [(one.prompt or slot.prompt.ids, one) for slot, group in groups for one in group]
        counts = [0 if mask_truncated and not one.ended else sum(one.own) for _, one in flat]
        divisors = Denominators(tokens=sum(counts), rows=len(flat), most_tokens=most_tokens)
        batch = cls(samples=[], advantage=[], weight=[], sampled=[], tokens=divisors.tokens)
        for (prompt, one), count, advantage in zip(flat, counts, gained, strict=True):
            if count and (advantage or keep_all):
                labels = [token if own else IGNORED for token, own in zip(one.ids, one.own, strict=True)]
                batch.samples.append({"input_ids": prompt + one.ids, "labels": [IGNORED] * len(prompt) + labels})
                batch.advantage.append(advantage)
                batch.weight.append(divisors.weight(loss, count))
                batch.sampled.append([*compress(one.logps, one.own)])
        return batch

    @property
    def lengths(self) -> list[int]:
        return [len(each["input_ids"]) for each in self.samples]

    def loss(
        self,
        entries: list[Entry],
        *,
        model: nn.Module,
        reference: nn.Module | None,
        objective: Objective,
        temperature: float,
        correction: Correction | None,
        device: torch.device,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The summed loss of one pack, a scalar, and sums over its tokens for the log.

        The first call for an entry keeps its log-probabilities: before the first update the policy is the one that
        sampled. `correction`: importance weights of (log-probabilities then, those under the sampler, documents'
        tokens), if another engine sampled.
        """
        (pack,) = pack_collate([PackedDataset(self.samples)[entries]])
        pack = to_device(pack, device)
        logp, entropy = _log_probs(model, pack, temperature)
        with torch.no_grad():
            behind = None if reference is None else _log_probs(reference, pack, temperature)[0]
        samples = [*map(number_of, entries)]
        parts = [self._predicted(entry) for entry in entries]
        counts = [part.stop - part.start for part in parts]
        for entry, values in zip(entries, logp.detach().split(counts), strict=True):
            self.old.setdefault(entry, values)
        old = torch.cat([self.old[entry] for entry in entries])
        repeats = torch.tensor(counts)
        weights = None
        sums = {"tokens": torch.tensor(len(logp)), "entropy": entropy.detach().sum()}
        if correction is not None:
            sampled = [self.sampled[sample][part] for sample, part in zip(samples, parts, strict=True)]
            theirs = torch.tensor([each for part in sampled for each in part], dtype=logp.dtype, device=logp.device)
            weights = correction(old, theirs, counts)
            sums["mismatch"] = (old - theirs).exp().nan_to_num(1.0).sum()

        def by_token(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=logp.dtype).repeat_interleave(repeats).to(logp.device)

        terms = TokenTerms(
            counts=counts,
            advantage=by_token([self.advantage[sample] for sample in samples]),
            weight=by_token([self.weight[sample] for sample in samples]),
            old=old,
            reference=behind,
            correction=weights,
        )
        loss, more = objective(logp, terms)
        return loss, sums | more

    def _predicted(self, entry: Entry) -> slice:
        """The range of its sample's learned tokens that an entry of a pack predicts."""
        if isinstance(entry, int):
            return slice(0, len(self.sampled[entry]))
        before = (self.samples[entry.sample]["labels"][: edge + 1] for edge in (entry.start, entry.stop))
        return slice(*(len(labels) - labels.count(IGNORED) for labels in before))


def _log_probs(model: nn.Module, pack: Pack, temperature: float) -> tuple[Tensor, Tensor]:
    logits, targets = predictions(model, pack)
    found = log_probs(logits / temperature, targets)
    return found.logp, found.entropy
