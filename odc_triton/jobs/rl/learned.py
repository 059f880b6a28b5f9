"""The learned completions of a rollout, with their advantages and weights, and the loss of a pack of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn

from ...nn.head import FusedLogits, log_probs
from ...packs.collate import Pack, PackedDataset, pack_collate, to_device
from ...packs.loss import predictions
from ...packs.reference import Teacher
from ...plan.entries import Entry, number_of
from ...plan.fields import IGNORED
from ...sequence.sums import SampleSums
from .generation import Sampled
from .importance import Importance
from .objective import LearningRule, Objective, TokenTerms, advantages
from .rollout import PromptSlot, Rollout


@dataclass(kw_only=True)
class Learned:
    """A rollout's completions that are learned, the same on every rank except `old`, which has this rank's only.

    By number, counted through all groups: ids and labels, advantage, weight of each token's loss, its tokens'
    log-probabilities under the engine that sampled. Tokens from outside are in the ids alone.
    `tokens`: of all completions, also of those left out. `divisor`: what sums of losses and gradients are divided by.
    """

    rule: LearningRule
    samples: dict[int, dict[str, list[int]]] = field(default_factory=dict)
    advantage: dict[int, float] = field(default_factory=dict)
    weight: dict[int, float] = field(default_factory=dict)
    sampled: dict[int, list[float]] = field(default_factory=dict)
    tokens: int = 0
    old: dict[Entry, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, made: Rollout, rule: LearningRule, scale: Any) -> Learned:
        batch = cls(rule=rule)
        together = len(made.totals) if scale == "batch" else 1  # else of each group, as where it comes alone
        gained = [advantages(some, scale) for some in made.totals.split(together)]
        for place, each in enumerate(zip(made.slots, made.sampled, torch.cat(gained).tolist(), strict=True)):
            batch.add(place, *each)
        return batch

    def add(self, place: int, slot: PromptSlot, group: Sequence[Sampled], gained: Sequence[float]) -> list[int]:
        """Adds what is learned of the completions of the slot at `place`; returns their numbers.

        `gained`: their advantages.
        """
        rule, numbers = self.rule, []
        for number, (one, advantage) in enumerate(zip(group, gained, strict=True), start=place * len(group)):
            count = 0 if rule.mask_truncated and not one.ended else sum(one.own)
            self.tokens += count
            if count and (advantage or rule.keep_all):
                prompt = one.prompt or slot.prompt.ids
                labels = [token if own else IGNORED for token, own in zip(one.ids, one.own, strict=True)]
                self.samples[number] = {"input_ids": prompt + one.ids, "labels": [IGNORED] * len(prompt) + labels}
                self.advantage[number] = advantage
                self.weight[number] = rule.weight(count)
                self.sampled[number] = [*compress(one.logps, one.own)]
                numbers.append(number)
        return numbers

    @property
    def divisor(self) -> float:
        return self.rule.divisor(self.tokens)

    def length(self, number: int) -> int:
        return len(self.samples[number]["input_ids"])

    def loss(
        self,
        entries: list[Entry],
        *,
        model: nn.Module,
        reference: Callable[[Pack], Tensor | FusedLogits] | None,
        objective: Objective,
        teacher: Teacher | None = None,
        temperature: float,
        correction: Importance | None,
        device: torch.device,
        pieces: SampleSums | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The summed loss of one pack, a scalar, to be divided by `divisor`, and sums over its tokens for the log.

        The first call for an entry keeps its log-probabilities: before the first update the policy is the one that
        sampled. `reference`: gives logits of a pack's targets. `correction`: the importance weights, if another engine
        sampled. `pieces`: sums over a completion's pieces, which is needed where other ranks have some.
        """
        (pack,) = pack_collate([PackedDataset(self.samples)[entries]])
        pack = to_device(pack, device)
        logits, targets = predictions(model, pack)
        own_weight = 1.0 if teacher is None else 1.0 - teacher.weight
        with torch.set_grad_enabled(own_weight > 0):
            found = log_probs(logits / temperature, targets)
        logp, behind = found.logp, None
        if reference is not None:
            with torch.no_grad():
                behind = log_probs(reference(pack) / temperature, targets).logp
        samples = [*map(number_of, entries)]
        parts = [self._predicted(entry) for entry in entries]
        counts = [*map(self._count, entries)]
        for entry, values in zip(entries, logp.detach().split(counts), strict=True):
            self.old.setdefault(entry, values)
        old = torch.cat([self.old[entry] for entry in entries])
        repeats = torch.tensor(counts)
        weights = mean = None
        terms_of_tokens, of_sequences = [logp.detach() - old], correction is not None and correction.is_of_sequences
        sums = {"tokens": torch.tensor(len(logp)), "entropy": found.entropy.detach().sum()}
        if correction is not None:
            sampled = [self.sampled[sample][part] for sample, part in zip(samples, parts, strict=True)]
            theirs = torch.tensor([each for part in sampled for each in part], dtype=logp.dtype, device=logp.device)
            apart = (old - theirs).nan_to_num(0.0)  # where theirs is unknown it counts as ours
            weights = correction.weights(apart)
            terms_of_tokens.append(apart if of_sequences else weights)
            sums["mismatch"] = apart.exp().nan_to_num(1.0).sum()

        def by_token(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=logp.dtype).repeat_interleave(repeats).to(logp.device)

        if objective.loss == "gspo" or of_sequences:
            totals = self._over_completions(entries, torch.stack(terms_of_tokens, 1), pieces)
            lengths = by_token([len(self.sampled[sample]) for sample in samples])
            if of_sequences:
                weights = correction.weights(totals[1])
            elif correction is not None:
                weights = totals[1] / lengths
            mean = totals[0] / lengths if objective.loss == "gspo" else None
        terms = TokenTerms(
            advantage=by_token([self.advantage[sample] for sample in samples]),
            weight=by_token([self.weight[sample] for sample in samples]),
            old=old,
            reference=behind,
            correction=weights,
            mean_log_ratio=mean,
        )
        loss, more = objective(logp, terms)
        if teacher is not None:
            apart = teacher.divergence(logits, pack)
            loss = own_weight * loss + teacher.weight * (apart * terms.weight).sum()
            more["divergence"] = apart.detach().sum()
        return loss, sums | more

    def _over_completions(self, entries: list[Entry], values: Tensor, pieces: SampleSums | None) -> Tensor:
        """`values` [n, k] of a pack's tokens summed over each token's whole completion: [k, n]."""
        of_entries = [(number_of(entry), self._count(entry)) for entry in entries]
        own: dict[int, Tensor] = {}
        for (sample, count), part in zip(of_entries, values.double().split([n for _, n in of_entries]), strict=True):
            if count:
                own[sample] = own.get(sample, 0.0) + part.sum(0)
        if pieces is not None:
            own = pieces.over_ranks(own, lambda piece: self._count(piece) > 0)
        totals = [own[sample].expand(count, -1) for sample, count in of_entries if count]
        return torch.cat([values[:0].double(), *totals]).to(values.dtype).T

    def _count(self, entry: Entry) -> int:
        """The learned tokens that an entry predicts."""
        part = self._predicted(entry)
        return part.stop - part.start

    def _predicted(self, entry: Entry) -> slice:
        """The range of its sample's learned tokens that an entry of a pack predicts."""
        if isinstance(entry, int):
            return slice(0, len(self.sampled[entry]))
        before = (self.samples[entry.sample]["labels"][: edge + 1] for edge in (entry.start, entry.stop))
        return slice(*(len(labels) - labels.count(IGNORED) for labels in before))
