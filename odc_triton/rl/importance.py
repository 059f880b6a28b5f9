"""Importance weights for completions that another engine sampled: its log-probabilities differ from the policy's.

A completion was drawn from mu, the engine's distribution, and the loss is an expectation under pi, the policy's before
the update. So the loss of its tokens is multiplied by rho, which is bounded, as single ratios may be huge:

    token_*      rho_t = exp(log pi_t - log mu_t)                    one for each token
    sequence_*   rho   = exp(sum_t (log pi_t - log mu_t))            one for each completion
    *_truncate   rho is clipped to the bounds
    *_mask       rho outside the bounds becomes 0

The arithmetic, names and defaults are those of TRL 1.16 (trainer/grpo_trainer.py, `vllm_importance_sampling_*`), on
packed rows instead of padded ones. A token whose mu is not known (NaN) counts as if mu were pi.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

Mode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


@dataclass(frozen=True, kw_only=True)
class ImportanceOptions:
    """How ratios are taken and bounded; None: no bound on that side."""

    mode: Mode = "sequence_mask"
    most: float | None = 3.0
    least: float | None = None

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ValueError(f"the importance sampling mode is {self.mode!r}: give one of {', '.join(get_args(Mode))}")
        least, most = self.least or 0.0, float("inf") if self.most is None else self.most
        if not 0 <= least <= most:
            raise ValueError(f"importance ratios are bounded by {self.least} and {self.most}: give 0 <= least <= most")


@dataclass(frozen=True, kw_only=True)
class ImportanceWeights:
    """`weights`: [tokens] fp32, to multiply the tokens' loss with. The rest is for the log, over this call's tokens."""

    weights: torch.Tensor
    ratio_min: float  # of the bounded ratios, of tokens or completions; all three 0 if there are none
    ratio_mean: float
    ratio_max: float
    difference_mean: float  # of |log pi - log mu| over the tokens where mu is known
    difference_max: float


@torch.no_grad()
def importance_weights(
    policy_logps: torch.Tensor, sampler_logps: torch.Tensor, lengths: torch.Tensor, options: ImportanceOptions
) -> ImportanceWeights:
    """The weights of completions that lie one after another: `policy_logps` and `sampler_logps` are [tokens], `lengths`
    [completions] their tokens each. Tokens that a mask keeps out of the loss are left out before.

    Raises ValueError if the shapes don't fit.
    """
    if policy_logps.shape != sampler_logps.shape or policy_logps.dim() != 1 or int(lengths.sum()) != len(policy_logps):
        raise ValueError(
            f"log-probabilities are {list(policy_logps.shape)} and {list(sampler_logps.shape)} for completions of "
            f"{int(lengths.sum())} tokens: give one of each for every token"
        )
    exact = policy_logps.float() - sampler_logps.float()
    known = exact[~exact.isnan()].abs()
    difference = exact.nan_to_num(nan=0.0)
    by_sequence = options.mode.startswith("sequence")
    if by_sequence:
        owner = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
        difference = difference.new_zeros(len(lengths)).index_add(0, owner, difference)
    ratio = difference.exp()
    if options.mode.endswith("truncate"):
        if options.least is not None or options.most is not None:
            ratio = ratio.clamp(options.least, options.most)
    else:
        most = float("inf") if options.most is None else options.most
        ratio = ratio.masked_fill((ratio < (options.least or 0.0)) | (ratio > most), 0.0)
    ratios = _spread(ratio)
    differences = _spread(known)
    return ImportanceWeights(
        weights=ratio[owner] if by_sequence else ratio,
        ratio_min=ratios[0],
        ratio_mean=ratios[1],
        ratio_max=ratios[2],
        difference_mean=differences[1],
        difference_max=differences[2],
    )


def _spread(values: torch.Tensor) -> list[float]:
    """[least, mean, most], 0 if there are none."""
    return torch.stack([values.min(), values.mean(), values.max()]).tolist() if len(values) else [0.0] * 3
