"""GRPO's arithmetic, as in TRL: rewards to advantages, log-probabilities to the terms of the loss.

Groups in which all advantages are 0 contribute nothing without a divergence, so they need not be computed; but their
completions count in the denominators as in TRL, so the update is the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

LossType = Literal["dapo", "grpo", "dr_grpo", "gspo", "cispo"]
_BY_TOKENS = ("dapo", "cispo")  # means over all tokens
_EPSILON = 1e-4


def advantages(rewards: Tensor, scale: Literal["group", "batch", "none"]) -> Tensor:
    """[prompts, completions] -> the same: the reward minus its group's mean, divided by a standard deviation.

    `scale`: the deviation of the "group", the "batch" (all of the step), or "none". A NaN reward (no function applied)
    gives 0.
    """
    known = ~rewards.isnan()
    counts = known.sum(1, keepdim=True).clamp(min=1)
    values = rewards.nan_to_num()
    centred = (values - values.sum(1, keepdim=True) / counts).masked_fill(~known, 0.0)
    if scale == "group":
        centred = centred / (_deviation(centred, counts) + _EPSILON)
    elif scale == "batch":
        batch = values[known] - values[known].mean()
        centred = centred / (_deviation(batch[None], known.sum().view(1, 1)) + _EPSILON)
    # A group whose rewards differ only by rounding has no variance.
    same = (values - values.gather(1, known.int().argmax(1, keepdim=True))).masked_fill(~known, 0.0) == 0
    return centred.masked_fill(same.all(1, keepdim=True), 0.0)


def _deviation(centred: Tensor, counts: Tensor) -> Tensor:
    """The sample standard deviation of centred rows."""
    return (centred.square().sum(1, keepdim=True) / (counts - 1).clamp(min=1)).sqrt()


@dataclass(frozen=True, kw_only=True)
class LearningRule:
    """Which of a minibatch's completions are learned, and with which weights; the same on every rank.

    rows: all of its completions; most_tokens: that one may have; keep_all: also those of advantage 0, which are only
    counted without a divergence.

    [Note: a denominator known at the end] The number of all tokens is known when the last completion is sampled, and
    gradients of others may be there by then. So tokens are weighted by a power of two, which changes no bit of a
    gradient, and the sums of gradients are divided by `divisor`.
    """

    loss: LossType
    rows: int
    most_tokens: int
    mask_truncated: bool = False
    keep_all: bool = False

    @property
    def _unit(self) -> int:
        """The power of two."""
        return 1 << (self.rows * self.most_tokens).bit_length() >> 1

    def weight(self, tokens: int) -> float:
        """The weight of each token's loss in a completion with `tokens` of them, until it is divided by `divisor`."""
        if self.loss in _BY_TOKENS:
            return 1 / self._unit
        return 1 / (self.rows * (self.most_tokens if self.loss == "dr_grpo" else max(tokens, 1)))

    def divisor(self, tokens: int) -> float:
        """What sums of weighted losses are divided by. `tokens`: of all completions that teach something."""
        return max(tokens, 1) / self._unit if self.loss in _BY_TOKENS else 1.0


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """The loss of TRL's `loss_type`, with ratios of whole sequences for "gspo" (`importance_sampling_level`).

    `low` and `high`: how far a ratio may be below and above 1; for "cispo" `high` is the largest ratio itself.
    """

    loss: LossType
    low: float
    high: float
    kl: float = 0.0

    def __call__(self, logp: Tensor, tokens: TokenTerms) -> tuple[Tensor, dict[str, Tensor]]:
        """The summed loss of the tokens of one pack, a scalar, and sums for the log; logp [n] is the policy's.

        `loss`: of `weight`s; sums are over tokens: `ratio`, `clipped`, `kl`.
        """
        log_ratio = logp - tokens.old
        if tokens.mean_log_ratio is not None:  # see [Note: ratios of whole completions]
            log_ratio = tokens.mean_log_ratio + (logp - logp.detach())
        ratio = log_ratio.exp()
        if self.loss == "cispo":
            terms = -ratio.clamp(max=self.high).detach() * tokens.advantage * logp
            clipped = (ratio > self.high) & (tokens.advantage > 0)
        else:
            bounded = ratio.clamp(1 - self.low, 1 + self.high)
            terms = -torch.minimum(ratio * tokens.advantage, bounded * tokens.advantage)
            clipped = ((ratio < 1 - self.low) & (tokens.advantage < 0)) | (
                (ratio > 1 + self.high) & (tokens.advantage > 0)
            )
        if tokens.correction is not None:
            terms = terms * tokens.correction
        sums = {"ratio": ratio.detach().sum(), "clipped": clipped.sum()}
        if tokens.reference is not None:
            behind = tokens.reference - logp
            divergence = behind.exp() - behind - 1
            terms = terms + self.kl * divergence
            sums["kl"] = divergence.detach().sum()
        return (terms * tokens.weight).sum(), sums


@dataclass(frozen=True, kw_only=True)
class TokenTerms:
    """Inputs of the loss of the n learned tokens of one pack, [n] each.

    [Note: ratios of whole completions] This rank may have some of a completion's n tokens. The completion's loss is
    w f(m) (c_1 + ... + c_n), of its tokens' weight w, the mean m of their log-ratios, and their corrections c. Its
    gradient for each token is w f'(m) times the mean of the corrections. So each token's loss is w f(m) times that
    mean, where m has the gradient of the token's own log-ratio: no rank needs the gradients of another's tokens.
    """

    advantage: Tensor
    weight: Tensor
    old: Tensor  # log-probabilities under the policy before the step
    reference: Tensor | None = None  # and under the reference model
    correction: Tensor | None = None  # importance weights, if another engine sampled
    mean_log_ratio: Tensor | None = None  # of the token's whole completion, for "gspo"
