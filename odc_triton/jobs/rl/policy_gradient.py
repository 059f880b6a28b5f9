"""GRPO's loss of the packs of a step's completions, as an objective of `run_step`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...nn.head import FusedLogits, log_probs
from ...packs.collate import Pack, PackedDataset, pack_collate
from ...packs.loss import predictions
from ...packs.reference import Teacher
from ...plan.entries import Entry, number_of
from ...sequence.sums import SampleSums
from ...step import Objective, Sums, Terms
from .importance import Importance
from .learned import Learned
from .policy_loss import PolicyLoss, TokenTerms


@dataclass(frozen=True, kw_only=True)
class PolicyGradient(Objective):
    """`rule` of the completions of `batch`, whose packs have their numbers. Divided by `batch.divisor`, known last.

    The first loss of an entry keeps its log-probabilities: before the first update the policy is the one that sampled.
    `reference`: gives logits of a pack's targets. `teacher`: adds a distillation loss. `correction`: the importance
    weights, if another engine sampled. `segments`: sums over a completion's segments, where other ranks may have some.

    Sums, over tokens: `tokens` themselves, `entropy`, `ratio`, `clipped`, and where there is such a model or
    correction `kl`, `divergence`, `mismatch`.
    """

    rule: PolicyLoss
    batch: Learned
    temperature: float
    reference: Callable[[Pack], Tensor | FusedLogits] | None = None
    teacher: Teacher | None = None
    correction: Importance | None = None
    segments: SampleSums | None = None

    def terms(self, model: nn.Module, packs: Any) -> Callable[[], float]:
        return lambda: self.batch.divisor

    def collate(self, entries: Sequence[Entry]) -> dict[str, Any]:
        (pack,) = pack_collate([PackedDataset(self.batch.samples)[entries]])
        return {**pack, "entries": entries}

    def loss(self, model: nn.Module, pack: Mapping[str, Any], terms: Terms) -> tuple[Tensor, Sums]:
        entries, teacher, batch = pack["entries"], self.teacher, self.batch
        logits, targets = predictions(model, pack)
        own_weight = 1.0 if teacher is None else 1.0 - teacher.weight
        with torch.set_grad_enabled(own_weight > 0):
            found = log_probs(logits / self.temperature, targets)
        logp, counts = found.logp, [*map(batch.count, entries)]
        for entry, values in zip(entries, logp.detach().split(counts), strict=True):
            batch.old.setdefault(entry, values)
        old, behind = torch.cat([batch.old[entry] for entry in entries]), None
        if self.reference is not None:
            with torch.no_grad():
                behind = log_probs(self.reference(pack) / self.temperature, targets).logp
        weights, mean, sums = self._corrected(entries, counts, logp.detach(), old)

        def by_token(values: Mapping[int, float]) -> Tensor:
            of_entries = torch.tensor([values[number_of(entry)] for entry in entries], dtype=logp.dtype)
            return of_entries.repeat_interleave(torch.tensor(counts)).to(logp.device)

        tokens = TokenTerms(
            advantage=by_token(batch.advantage),
            weight=by_token(batch.weight),
            old=old,
            reference=behind,
            correction=weights,
            mean_log_ratio=mean,
        )
        loss, more = self.rule(logp, tokens)
        if teacher is not None:
            apart = teacher.divergence(logits, pack)
            loss = own_weight * loss + teacher.weight * (apart * tokens.weight).sum()
            more["divergence"] = apart.detach().sum()
        return loss, {"tokens": len(logp), "entropy": found.entropy.detach().sum(), **sums, **more}

    def _corrected(
        self, entries: Sequence[Entry], counts: Sequence[int], logp: Tensor, old: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Sums]:
        """Of each of a pack's n tokens its importance weight and its completion's mean log-ratio, [n] where there are
        such; and sums.
        """
        batch, correction, weights = self.batch, self.correction, None
        of_sequences = correction is not None and correction.is_of_sequences
        of_tokens, sums = [logp - old], {}
        if correction is not None:
            parts = [batch.sampled[number_of(entry)][batch.predicted(entry)] for entry in entries]
            theirs = torch.tensor([each for part in parts for each in part], dtype=logp.dtype, device=logp.device)
            apart = (old - theirs).nan_to_num(0.0)  # where theirs is unknown it counts as ours
            weights = correction.weights(apart)
            of_tokens.append(apart if of_sequences else weights)
            sums["mismatch"] = apart.exp().nan_to_num(1.0).sum()
        if self.rule.loss != "gspo" and not of_sequences:
            return weights, None, sums
        totals = self._over_completions(entries, counts, torch.stack(of_tokens, 1))
        numbers = torch.tensor([len(batch.sampled[number_of(entry)]) for entry in entries], dtype=logp.dtype)
        lengths = numbers.repeat_interleave(torch.tensor(counts)).to(logp.device)
        if correction is not None:
            weights = correction.weights(totals[1]) if of_sequences else totals[1] / lengths
        return weights, totals[0] / lengths if self.rule.loss == "gspo" else None, sums

    def _over_completions(self, entries: Sequence[Entry], counts: Sequence[int], values: Tensor) -> Tensor:
        """`values` [n, k] of a pack's tokens summed over each token's whole completion: [k, n]."""
        own: dict[int, Tensor] = {}
        for entry, count, part in zip(entries, counts, values.double().split([*counts]), strict=True):
            if count:
                own[number_of(entry)] = own.get(number_of(entry), 0.0) + part.sum(0)
        if self.segments is not None:
            own = self.segments.over_ranks(own, lambda segment: self.batch.count(segment) > 0)
        totals = [
            own[number_of(entry)].expand(count, -1) for entry, count in zip(entries, counts, strict=True) if count
        ]
        return torch.cat([values[:0].double(), *totals]).to(values.dtype).T
