"""Cross-entropy over target tokens, and what SFT adds to it: routers' losses, smoothing, DFT, a teacher."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..base.untyped import untyped
from ..nn.head import FusedLogits
from ..packs.loss import router_predictions
from ..packs.reference import Teacher
from ..packs.router_loss import router_weight
from ..step import Objective, Sums, Terms


@dataclass(frozen=True, kw_only=True)
class CrossEntropy(Objective):
    """loss = sum over target tokens of -log p(token) / all ranks' targets, and in training routers' auxiliary losses,
    of each sample, weighted by the model's config, / all ranks' samples.

    Sums: `token_loss`, not divided; `router`, neither weighted nor divided; with `measures` also `entropy`, and
        `accuracy`, how many targets are the most likely token, NaN for a fused head, which does not find it.

    label_smoothing: as F.cross_entropy's.
    dft: each token's loss is weighted by its probability, without a gradient (dynamic fine-tuning, as in TRL's
        SFTTrainer).
    measures: report entropy and accuracy.

    Raises ValueError for smoothing below 0 or above 1, or with dft, and for a router's loss where samples are unknown.
    """

    label_smoothing: float = 0.0
    dft: bool = False
    measures: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing <= 1 or (self.dft and self.label_smoothing):
            raise ValueError(
                f"label_smoothing is {self.label_smoothing}{' with dft' * self.dft}: give a number from 0 to 1, with "
                f"dft 0"
            )

    def terms(self, model: nn.Module, packs: Any) -> Any:
        if model.training and router_weight(model) and not getattr(packs, "samples", 0):
            raise ValueError("a router's auxiliary loss needs the samples of all ranks: use a MinibatchSampler's packs")
        return super().terms(model, packs)

    def loss(self, model: nn.Module, pack: Mapping[str, Any], terms: Terms) -> tuple[Tensor, Sums]:
        weight = router_weight(model) if model.training else 0.0
        logits, targets, router = router_predictions(model, pack, bool(weight))
        summed, sums = self._of_tokens(logits, targets, pack)
        loss = summed / terms.number
        if weight:
            loss = loss + weight / max(terms.samples, 1) * router
        return loss, {"token_loss": summed, "router": router, **sums}

    def _of_tokens(self, logits: Tensor | FusedLogits, targets: Tensor, pack: Mapping[str, Any]) -> tuple[Tensor, Sums]:
        """The summed loss, and other sums over the n targets; logits [n, V]."""
        if not (self.measures or self.dft):
            return self._cross_entropy(logits, targets, "sum"), {}
        losses, entropy, is_first = self._by_token(logits, targets).sum(1)
        return losses, {"entropy": entropy, "accuracy": is_first}

    def _by_token(self, logits: Tensor | FusedLogits, targets: Tensor) -> Tensor:
        """Loss, entropy, and 1 if the target is the most likely token: [3, n] in fp32."""
        if isinstance(logits, FusedLogits):
            found = logits.log_probs(targets)
            logp, entropy, is_first = found.logp, found.entropy.detach(), torch.full_like(found.logp, math.nan)
        else:
            every = logits.float().log_softmax(-1)
            logp = every.gather(-1, targets[:, None])[:, 0]
            with torch.no_grad():
                entropy, is_first = -(every.exp() * every).sum(-1), (every.argmax(-1) == targets).float()
        losses = -logp * logp.detach().exp() if self.dft else -logp
        if self.label_smoothing:
            losses = self._cross_entropy(logits, targets, "none")
        return torch.stack([losses, entropy, is_first.detach()])

    def _cross_entropy(self, logits: Tensor | FusedLogits, targets: Tensor, reduction: str) -> Tensor:
        how = {"reduction": reduction, "label_smoothing": self.label_smoothing}
        return F.cross_entropy(untyped(logits).float(), targets, **how)


@dataclass(frozen=True, kw_only=True)
class Distillation(CrossEntropy):
    """`teacher.weight` times the divergence from the teacher's distributions, and the rest of CrossEntropy.

    Sums: also `divergence`, over target tokens; `token_loss` is the mix.

    label_smoothing, dft, measures: as of `CrossEntropy`.
    teacher: a `Teacher` of the model that trains.

    Raises ValueError for an evaluation of packs with segments, which a teacher reads in minibatches only.
    """

    teacher: Teacher

    def terms(self, model: nn.Module, packs: Any) -> Any:
        plan = getattr(packs, "plan", None)
        if not torch.is_grad_enabled() and plan is not None and plan.split is not None:
            raise ValueError(
                "a teacher can't evaluate segments of samples: evaluate by CrossEntropy, or on unsplit samples"
            )
        return super().terms(model, packs)

    def _of_tokens(self, logits: Tensor | FusedLogits, targets: Tensor, pack: Mapping[str, Any]) -> tuple[Tensor, Sums]:
        weight, own, sums = self.teacher.weight, torch.zeros((), device=targets.device), {}
        if weight < 1 or self.measures:
            own, sums = super()._of_tokens(logits, targets, pack)
        apart = self.teacher.divergence(logits, pack).sum()
        return weight * apart + (1 - weight) * own, {**sums, "divergence": apart}
