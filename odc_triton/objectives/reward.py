"""The loss of reward models, as an objective of `run_step`.

    loss = 1/N  sum over pairs of -log sigmoid(s(c) - s(r)) + center (s(c) + s(r))²

s: the score of a sample's last token; c: chosen, r: rejected; N: all ranks' pairs. Source: RewardTrainer of TRL 1.16.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ..packs.loss import predictions
from ..step import Sums, Terms
from .pairs import PairObjective, rewards


@dataclass(frozen=True, kw_only=True, eq=False)
class BradleyTerry(PairObjective):
    """Scores of pairs, as `PairObjective` has them, by a sequence classifier of one label.

    The only label of a sample that is not -100 is that of one token more than it has: the token before it is scored.

    samples, sums: as of `PairObjective`.
    center: the factor of the squared sum of a pair's scores, which is added to the loss.
    """

    center: float = 0.0

    def loss(self, model: nn.Module, pack: Mapping[str, Any], terms: Terms) -> tuple[Tensor, Sums]:
        scores, _ = predictions(model, pack)
        chosen, rejected = self.of_pairs(pack, scores[:, 0]).unbind(1)
        losses = -F.logsigmoid(chosen - rejected) + self.center * (chosen + rejected) ** 2
        sums = self.counted(pack, {"loss": losses, **rewards(chosen, rejected)})
        return self.total(pack, losses) / terms.number, sums
