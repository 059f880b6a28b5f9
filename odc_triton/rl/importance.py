"""Importance weights for completions that another engine sampled: its log-probabilities differ from the policy's.

A completion was drawn from mu, the engine's distribution, and the loss is an expectation under pi, the policy's before
the update. So the loss of its tokens is multiplied by rho, which is bounded because single ratios may be huge:

    token_*      rho_t = exp(log pi_t - log mu_t)                    one for each token
    sequence_*   rho   = exp(sum_t (log pi_t - log mu_t))            one for each completion
    *_truncate   rho above the bound becomes the bound
    *_mask       rho above the bound becomes 0

The arithmetic, names and defaults are those of TRL 1.16 (trainer/grpo_trainer.py, `vllm_importance_sampling_*`), on
packed rows instead of padded ones. A token whose mu is unknown (NaN) counts as if mu were pi.
"""

from __future__ import annotations

from typing import Literal

import torch

Mode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


@torch.no_grad()
def importance_weights(
    policy_logps: torch.Tensor, sampler_logps: torch.Tensor, lengths: torch.Tensor, *, mode: Mode, most: float
) -> torch.Tensor:
    """The weights [tokens], fp32, of the tokens' loss, for concatenated completions.

    `policy_logps` and `sampler_logps` are [tokens], `lengths` [completions] their tokens each. Tokens that are masked
    in the loss must be removed before. `most`: the bound. Raises ValueError if the shapes don't match.
    """
    if policy_logps.shape != sampler_logps.shape or policy_logps.dim() != 1 or int(lengths.sum()) != len(policy_logps):
        raise ValueError(
            f"log-probabilities are {list(policy_logps.shape)} and {list(sampler_logps.shape)} for completions of "
            f"{int(lengths.sum())} tokens: give one of each for every token"
        )
    difference = (policy_logps.float() - sampler_logps.float()).nan_to_num(nan=0.0)
    if mode.startswith("sequence"):
        owner = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
        difference = difference.new_zeros(len(lengths)).index_add(0, owner, difference)[owner]
    ratio = difference.exp()
    if mode.endswith("truncate"):
        return ratio.clamp(max=most)
    return ratio.masked_fill(ratio > most, 0.0)
