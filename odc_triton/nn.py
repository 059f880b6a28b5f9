"""Layers on sharded parameters, with torch's names, arguments and state-dict keys."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from .functions import token_log_probs, whole_weight
from .head import FusedLogits, TokenLogProbs


class LMHead(nn.Linear):
    """The vocabulary projection of a language model, [.., D] -> [.., V], without bias.

    In training its output is a `FusedLogits`: shape and cross-entropy of logits that are never made. In evaluation, the
    logits. Its weight is never gathered whole in training: it is read, and its gradient added, a chunk of one owner's
    rows at a time.
    """

    reads_on_demand = ("weight",)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias=False, device=device, dtype=dtype)

    def forward(self, h: torch.Tensor) -> torch.Tensor | FusedLogits:
        if self.training:
            return FusedLogits(h, self.weight)
        return F.linear(h, whole_weight(self.weight))

    def log_probs(self, h: torch.Tensor, targets: torch.Tensor, *, ignore_index: int = -100) -> TokenLogProbs:
        """Log-probabilities of `targets` [...] after hidden states h [..., D], and the entropy; in any mode."""
        logp, entropy = token_log_probs(h, self.weight, targets, ignore_index=ignore_index)
        return TokenLogProbs(logp=logp, entropy=entropy)
