"""The learned completions of a rollout, with their advantages and weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from ...plan.entries import Entry
from ...plan.fields import IGNORED
from .generation import Sampled
from .policy_loss import LearningRule, advantages
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

    def count(self, entry: Entry) -> int:
        """The learned tokens that an entry predicts."""
        part = self.predicted(entry)
        return part.stop - part.start

    def predicted(self, entry: Entry) -> slice:
        """The range of its sample's learned tokens that an entry of a pack predicts."""
        if isinstance(entry, int):
            return slice(0, len(self.sampled[entry]))
        before = (self.samples[entry.sample]["labels"][: edge + 1] for edge in (entry.start, entry.stop))
        return slice(*(len(labels) - labels.count(IGNORED) for labels in before))
