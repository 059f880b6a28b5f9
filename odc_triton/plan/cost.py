"""CostModel: the cost of training on a sequence, as a function of its length."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from .decoder import Decoder

_PAIR = 0.48  # of a delta rule's time: what its call on augmented values takes more
Timings = Sequence[tuple[float, float]]  # of several lengths: FLOPs, seconds


def attention_factor(attention: Timings, linear: Timings) -> float:
    """The time of a FLOP of attention in those of linear layers, by least squares through 0: long sequences count most.

    1.0 where they differ by up to 5%. Raises ValueError for times that are not positive.
    """
    slopes = [sum(f * s for f, s in each) / sum(f * f for f, _ in each) for each in (attention, linear)]
    if not all(math.isfinite(slope) and slope > 0 for slope in slopes):
        raise ValueError(f"the times are {attention} and {linear}: they must be positive")
    factor = slopes[0] / slopes[1]
    return factor if abs(factor - 1) > 0.05 else 1.0


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Cost of a sequence of s tokens = quadratic s² + linear s, in arbitrary units.

    quadratic: of attention.
    linear: of all work per token.
    microbatch: of a microbatch, whatever its documents (launches, small layers). It counts in `pack` and never decides
        between two assignments with equally many packs.
    head: the part of `linear` which tokens without a target don't cost, where it is known which these are (shared
        prefixes).
    pair: what a token costs more in a segment between two others of its sample, which makes the pair that hands on a
        recurrent layer's state, where the first and the last segment need none.

    Raises ValueError for a coefficient that is negative or not finite, if the cost does not grow with s, and for a head
    of the linear part or more.
    """

    quadratic: float
    linear: float
    microbatch: float = 0.0
    head: float = 0.0
    pair: float = 0.0

    def __post_init__(self) -> None:
        for name in ("quadratic", "linear", "microbatch", "head", "pair"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"CostModel.{name} is {value}: give a finite coefficient of 0 or more")
        if self.quadratic == 0 and self.linear == 0:
            raise ValueError("CostModel: quadratic and linear are both 0, so a sequence costs nothing; give one")
        if self.head >= self.linear > 0 or self.head > self.linear:
            raise ValueError(
                f"CostModel.head is {self.head}, of linear {self.linear}: give less, as it is a part of it"
            )

    def sequence(self, tokens: int) -> float:
        """Cost of one document of `tokens` tokens."""
        return (self.quadratic * tokens + self.linear) * tokens

    def samples(self, lengths: Sequence[int], extra: Sequence[float] | None = None) -> list[float]:
        """Cost of each sample of `lengths` tokens. `extra`: what each costs in addition to its tokens (`TowerCost`).

        Raises ValueError for extra costs of another number, or one that is negative or not finite.
        """
        extra = [0.0] * len(lengths) if extra is None else extra
        if len(extra) != len(lengths):
            raise ValueError(f"extra has {len(extra)} costs for {len(lengths)} samples: give one for each")
        for index, each in enumerate(extra):
            if not (math.isfinite(each) and each >= 0):
                raise ValueError(f"extra[{index}] is {each}: give a finite cost of 0 or more")
        return [self.sequence(length) + each for length, each in zip(lengths, extra, strict=True)]

    @property
    def between(self) -> CostModel:
        """Of a segment between two others of its sample."""
        return replace(self, linear=self.linear + self.pair, pair=0.0) if self.pair else self

    def segment(self, start: int, stop: int, learned: int = 0) -> float:
        """Cost of a document's tokens `start` to `stop`, which attend to all of its tokens before them.

        Those before `learned` predict no target.
        """
        without = max(min(stop, learned) - start, 0)
        return (self.quadratic * (start + stop) + self.linear) * (stop - start) - self.head * without

    def reach(self, start: int, cost: float, learned: int = 0) -> float:
        """The token up to which a document's tokens from `start` cost `cost`: where `segment` is inverted.

        learned: as in `segment`.
        """
        linear = self.linear
        if start < learned:
            if cost < (before := self.segment(start, learned, learned)):
                linear -= self.head
            else:
                start, cost = learned, cost - before
        cost += (self.quadratic * start + linear) * start
        if cost <= 0:
            return 0.0
        return 2 * cost / (linear + math.sqrt(linear**2 + 4 * self.quadratic * cost))

    def pack(self, lengths: Iterable[int]) -> float:
        """Cost of one microbatch of documents of these `lengths`: the sum of theirs, as attention keeps them apart."""
        return self.microbatch + math.fsum(self.sequence(tokens) for tokens in lengths)

    @classmethod
    def paper_7b(cls) -> CostModel:
        """The paper's fit for a 7 B model, 4.348 x² + 8.768 x with x = s/32000 (arXiv 2601.19362)."""
        return cls(quadratic=4.348 / 32000**2, linear=8.768 / 32000)

    @classmethod
    def from_config(cls, config: object, *, attention: float = 1.0, rule: float = 1.0) -> CostModel:
        """FLOPs of forward and backward of a decoder, from the attributes of its transformers config.

        With L layers that have attention, R that are recurrent, W weights that a token is multiplied with in all layers
        (of experts only those that a token is routed to), hidden width h, vocabulary V, q query heads whose keys and
        values are k and v wide, and r FLOPs of a recurrent layer's rule:

            forward, per token    2 [ W + h V ] + R r
            forward, attention    L * 2 q (k + v) s² / 2   (scores, weighted sum; half, as causal)
            backward              twice the forward
            pair, per token       0.48 of the rule's, forward and backward, where it is a matrix

        Left out: norms, the optimizer, recomputation by activation checkpointing and flash attention, sliding windows
        (their layers cost less), a router's imbalance.

        config: of a causal LM, or its text part.
        attention, rule: the time of a FLOP of attention, and of a recurrent layer's rule, in those of linear layers,
            which `odc-triton tune` measures and prints.

        Raises ValueError naming an attribute that is missing or not positive.
        """
        decoder = Decoder.of(config)
        widths = decoder.key_width + decoder.value_width
        rules = rule * 3 * decoder.recurring * decoder.recurrent.flops if decoder.recurrent else 0
        return cls(
            quadratic=attention * 3 * decoder.attending * decoder.heads * widths,
            linear=3 * 2 * (decoder.active + decoder.table) + rules,
            head=3 * 2 * decoder.table,
            pair=_PAIR * rules if decoder.recurrent and decoder.recurrent.is_paired else 0.0,
        )
