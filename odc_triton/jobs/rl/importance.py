"""Importance weights for completions that another engine sampled: its log-probabilities differ from the policy's.

A completion was drawn from mu, the engine's distribution, and the loss is an expectation under pi, the policy's before
the update. So the loss of its tokens is multiplied by rho, at most c, as single ratios may be huge:

    token_*      rho_t = exp(log pi_t - log mu_t)                    one for each token
    sequence_*   rho   = exp(sum_t (log pi_t - log mu_t))            one for each completion
    *_truncate   min(rho, c)
    *_mask       rho if rho <= c, else 0

The arithmetic, names and defaults are those of TRL 1.16 (trainer/grpo_trainer.py, `vllm_importance_sampling_*`), on
packed rows instead of padded ones. A token whose mu is unknown (NaN) counts as if mu were pi.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Mode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


@dataclass(frozen=True, kw_only=True)
class Importance:
    """`most`: c, the largest weight."""

    mode: Mode
    most: float

    @property
    def is_of_sequences(self) -> bool:
        return self.mode.startswith("sequence")

    def weights(self, log_ratios: torch.Tensor) -> torch.Tensor:
        """The weights of the loss. `log_ratios`: log pi - log mu of each token, or of its whole completion."""
        ratio = log_ratios.exp()
        if self.mode.endswith("truncate"):
            return ratio.clamp(max=self.most)
        return ratio.masked_fill(ratio > self.most, 0.0)
