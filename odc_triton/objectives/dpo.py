"""DPO, direct preference optimisation, as an objective of `run_step`.

    ratio(y) = sum over the tokens t of a completion y of log p(x_t | x_<t) - log q(x_t | x_<t)
    margin   = ratio(c) - ratio(r)    of a pair's completions c, r
    loss     = 1/N  sum over pairs of -log sigmoid(beta margin)                            sigmoid
               1/N  sum over pairs of max(0, 1 - beta margin)                              hinge
               1/N  sum over pairs of (ratio(c) / |c| - ratio(r) / |r| - 1 / (2 beta))²    ipo

p: the model, q: the reference; c: chosen, r: rejected; N: all ranks' pairs. Sources: arXiv 2305.18290, equation 7;
2310.12036, equation 17, by token as in DPOTrainer of TRL 1.16.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..nn.head import FusedLogits, log_probs
from ..packs.loss import predictions
from ..step import Sums, Terms
from .pairs import PairObjective, rewards

Logits = Callable[[Mapping[str, Any]], Tensor | FusedLogits]  # of a pack's targets, [n, V]
_LOSSES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "sigmoid": lambda margin, beta: -F.logsigmoid(beta * margin),
    "hinge": lambda margin, beta: (1 - beta * margin).relu(),
    "ipo": lambda margin, beta: (margin - 1 / (2 * beta)) ** 2,
}


@dataclass(frozen=True, kw_only=True, eq=False)
class DPO(PairObjective):
    """DPO of pairs, as `PairObjective` has them.

        dpo = DPO(samples=samples, reference=Reference(frozen, model))
        report = run_step(model, plan.packs(rank), dpo, collate=dpo.collate)
        dpo.means(report.sums)["rewards/accuracies"]

    samples, sums: as of `PairObjective`.
    reference: the logits [n, V] of a pack's targets by the model that is not trained: a `Reference` or
        `AdapterReference`.
    beta: rewards are beta times the ratios.
    kind: of the loss.

    Raises ValueError also for another kind, and a beta that is not above 0.
    """

    reference: Logits
    beta: float = 0.1
    kind: Literal["sigmoid", "hinge", "ipo"] = "sigmoid"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind not in _LOSSES or not 0 < self.beta < math.inf:
            raise ValueError(
                f"kind is {self.kind!r}, beta {self.beta}: give one of {', '.join(_LOSSES)}, and a number above 0"
            )

    def loss(self, model: nn.Module, pack: Mapping[str, Any], terms: Terms) -> tuple[Tensor, Sums]:
        logits, targets = predictions(model, pack)
        logp = log_probs(logits, targets).logp
        with torch.no_grad():
            reference = log_probs(self.reference(pack), targets).logp
        ratio_P2 = self.of_pairs(pack, logp.double() - reference.double())
        per_token_P2 = ratio_P2 / pack["lengths"] if self.kind == "ipo" else ratio_P2
        margin = per_token_P2[:, 0] - per_token_P2[:, 1]
        losses = _LOSSES[self.kind](margin, self.beta)
        sums = self.counted(pack, {"loss": losses, **rewards(*(self.beta * ratio_P2).unbind(1))})
        return self.total(pack, losses) / terms.number, sums
