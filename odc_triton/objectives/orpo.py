"""ORPO, odds ratio preference optimisation, as an objective of `run_step`.

    nll       = -1/T  sum over the chosen samples' tokens t, without each sample's first, of log p(x_t | x_<t)
    logp(y)   = 1/|y|  sum over the tokens t of a completion y, without a sample's first, of log p(x_t | x_<t)
    log_odds  = log P(c) / (1 - P(c)) - log P(r) / (1 - P(r))    of a pair's completions c, r; P(y) = exp(logp(y))
    loss      = nll - beta / N  sum over pairs of log sigmoid(log_odds)

T: all ranks' such tokens, those of prompts too; c: chosen, r: rejected; N: all ranks' pairs. Sources: arXiv 2403.07691,
equations 4, 6 and 7; trl/experimental/orpo/orpo_trainer.py of TRL 1.16.

[Note: readers] Of samples that share a prompt one computes it, maybe a rejected one, maybe on another rank. So the
log-probability of a token counts in `nll` as often as chosen samples have it: its readers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..nn.head import log_probs
from ..packs.loss import predictions
from ..plan.entries import Entry, Segment, begins
from ..plan.segments import reads_of
from ..step import Sums, Terms
from .pairs import PairObjective

_OF_PAIRS = ("log_odds_ratio", "log_odds_chosen", "logps/chosen", "logps/rejected", "rewards/accuracies")


@dataclass(frozen=True, kw_only=True, eq=False)
class ORPO(PairObjective):
    """ORPO of pairs, as `PairObjective` has them.

        orpo = ORPO(samples=samples)
        report = run_step(model, plan.packs(rank), orpo, collate=orpo.collate)

    Report: of sums that `means` divides. An evaluation has no common divisor of both terms: its loss is among these. As
        in TRL, the gradient of a completion of probability 1 is not finite.

    samples, sums: as of `PairObjective`.
    beta: the factor of the odds ratio's term.

    Raises ValueError also for a beta below 0.
    """

    beta: float = 0.1
    _readers: dict[Segment, Tensor] = field(default_factory=dict, init=False, repr=False)  # of this minibatch

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.beta < math.inf:
            raise ValueError(f"beta is {self.beta}: give a number of at least 0")

    def terms(self, model: nn.Module, packs: Any) -> int:
        """T of the chosen samples that begin on this rank."""
        super().terms(model, packs)
        planned = [] if packs.split is None else [each.segment for each in packs.split.segments]
        self._count_readers([*planned, *(self._segment(entry) for pack in packs for entry in pack)])
        return sum(self._segment(sample).stop - 1 for sample in self._chosen(packs))

    def _count_readers(self, segments: Sequence[Segment]) -> None:
        """By segment, of each token of its sample that it predicts: see [Note: readers]."""
        reads = reads_of({*segments})
        self._readers.clear()
        self._readers.update((each, torch.zeros(self._segment(each.sample).stop, dtype=torch.int64)) for each in reads)
        for segment, before in ((each, reads[each]) for each in reads if each.sample % 2 == 0):
            for holder, low, high in (*(before if begins(segment) else ()), (segment, segment.start, segment.stop)):
                self._readers[holder][low + 1 : high + 1] += 1

    def collate(self, entries: Sequence[Entry]) -> dict[str, Any]:
        """PairObjective's, and of its n targets `readers`, [n]."""
        segments = [*map(self._segment, entries)]
        if missing := {*segments} - self._readers.keys():
            raise RuntimeError(f"{missing.pop()} is of no minibatch of this ORPO: give run_step collate=orpo.collate")
        readers = [self._readers[segment][self._scored(segment)] for segment in segments]
        return super().collate(entries) | {"readers": torch.cat(readers).double()}

    def _scored(self, segment: Segment) -> Tensor:
        return self._completion(segment) | (self._readers[segment] > 0)

    def loss(self, model: nn.Module, pack: Mapping[str, Any], terms: Terms) -> tuple[Tensor, Sums]:
        logp = log_probs(*predictions(model, pack)).logp.double()
        nll = -(pack["readers"] * logp).sum()
        logp_P2 = self.of_pairs(pack, logp) / pack["lengths"]
        # log(1 - P), whose branches meet where neither cancels.
        rest_P2 = torch.where(logp_P2 < -math.log(2), (-logp_P2.exp()).log1p(), (-logp_P2.expm1()).log())
        log_odds, (chosen, rejected) = -(logp_P2 - rest_P2).diff(dim=1)[:, 0], logp_P2.unbind(1)
        log_ratio = F.logsigmoid(log_odds)
        of_pairs = (log_ratio, log_odds, chosen, rejected, (chosen > rejected).double())
        sums = self.counted(pack, dict(zip(_OF_PAIRS, of_pairs, strict=True)))
        loss = nll / terms.number - self.beta * self.total(pack, log_ratio) / (terms.samples / 2)
        return loss, {**sums, "nll_tokens": pack["readers"].sum(), "nll_loss": nll}

    def means(self, sums: Mapping[str, float]) -> dict[str, float]:
        """The loss, and TRL's metrics but for those of logits, of a report's sums."""
        found = super().means({name: value for name, value in sums.items() if not name.startswith("nll")})
        nll = sums["nll_loss"] / sums["nll_tokens"]
        chosen, rejected = self.beta * found["logps/chosen"], self.beta * found["logps/rejected"]
        rewards = {"rewards/chosen": chosen, "rewards/rejected": rejected, "rewards/margins": chosen - rejected}
        return {"loss": nll - self.beta * found["log_odds_ratio"], "nll_loss": nll, **found, **rewards}
