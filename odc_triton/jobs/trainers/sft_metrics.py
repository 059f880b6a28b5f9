"""TRL's SFTTrainer's other loss besides cross-entropy, and its metrics of tokens, on packs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...nn.head import FusedLogits

NAMES = ("entropy", "mean_token_accuracy")


def token_losses(logits: Tensor | FusedLogits, targets: Tensor, args: Any) -> Tensor:
    """The losses of n predicted tokens and the values of the metrics `NAMES`, [3, n] in fp32.

    args: TrainingArguments, whose label_smoothing_factor and, if any, loss_type ("nll" or "dft") count.
    A fused head does not compute the most likely token: then the last row is NaN.
    """
    dft = getattr(args, "loss_type", None) == "dft"
    smoothing = 0.0 if dft else args.label_smoothing_factor
    if isinstance(logits, FusedLogits):
        found = logits.log_probs(targets)
        logp, entropy, is_first = found.logp, found.entropy.detach(), torch.full_like(found.logp, math.nan)
    else:
        every = logits.float().log_softmax(-1)
        logp = every.gather(-1, targets[:, None])[:, 0]
        with torch.no_grad():
            entropy, is_first = -(every.exp() * every).sum(-1), (every.argmax(-1) == targets).float()
    if smoothing:
        losses = F.cross_entropy(logits.float(), targets, reduction="none", label_smoothing=smoothing)
    else:
        losses = -logp * logp.detach().exp() if dft else -logp
    return torch.stack([losses, entropy, is_first.detach()])


def append(metrics: Any, sums: Sequence[float], targets: float, tokens: int) -> None:
    """Appends means to SFTTrainer's lists. `sums`: of each of `NAMES` over `targets`; `tokens`: trained on so far."""
    for name, total in zip(NAMES, sums, strict=True):
        if not math.isnan(total):
            metrics[name].append(total / max(targets, 1))
    metrics["num_tokens"] = [tokens]
