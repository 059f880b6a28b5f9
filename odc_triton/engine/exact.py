"""Gradients summed as 64-bit integers: the same bits whatever the order of the additions. Ranks agree on their scales.

    q = trunc(g 2^e)          gradient = 2^-e * sum of all q

One exponent e per parameter, the same on all ranks: it follows from what all ranks send at the exit.

[Note: no overflow] A sum that has wrapped can't be seen afterwards. So each rank counts its additions to an element and
keeps the largest |q|. At the exit all ranks know (additions of all ranks) * (largest of all), which bounds every sum
and every partial sum. If it may reach 2^62 the minibatch is to be run again, with e adapted. Neither factor depends on
which rank computed what, so neither does e.

[Note: how many bits] e is chosen so that the next minibatch's upper bound is 2^54 if it is as large as this one's. So
it may grow 256 times before a minibatch must be repeated, and an element 2^-30 of the largest keeps more bits than fp32
has. What is smaller than 2^-54 of the upper bound is lost.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from odc_kernels.peers import ExactAdds, PeerShards

from ..base.errors import MinibatchToRepeat, RanksDiffer
from ..nn.operand import add_rows
from .minibatch import Participant
from .protocol import Protocol
from .shard import HeapShard, Shard
from .transport import Target

_WANTED_BITS = 54  # of the upper bound; see [Note: how many bits]
_MOST_BITS = 62
_LEAST_BITS = 30  # of the upper bound of a parameter whose exponent was a guess
_GUESSED_BITS = 16  # a first bound of 2^16: far more than a gradient of a mean over tokens
_MOST_EXPONENT = 120  # 2^e must be an fp32 number
_BLOCK = 2**16  # elements that stay in a core's cache
_BLOCK_ON_A_GPU = 2**24  # few launches, and 64 MiB for a block's fp32 numbers
_ZERO = -(10**6)  # bits of what is 0

Added = tuple[int, int | None]  # additions to an element; k, where all |q| < 2^k; None for what is not finite


class ExactSum:
    """One parameter's: `exponent`, and what this rank has added in this minibatch.

    `is_guess`: no gradient but 0 has been seen yet. `device`: where kernels run that add. `largest`: int32 [1], the
    bits of the largest |g| that kernels have added.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.exponent = self.next_exponent = _WANTED_BITS - _GUESSED_BITS
        self.is_guess = True
        self.largest = torch.zeros(1, dtype=torch.int32, device=device)
        self.clear()

    def clear(self) -> None:
        """The next minibatch begins. Zero `largest` too."""
        self.exponent = self.next_exponent
        self.additions, self._bits, self._is_finite, self.is_nan = 0, _ZERO, True, False

    @torch.no_grad()
    def add(self, shard: torch.Tensor, at: int | torch.Tensor, rows: torch.Tensor) -> None:
        """Adds to an owner's shard, int64, as `nn.operand.add_rows` does. Nobody else may add to it meanwhile.

        Raises ValueError for rows on a GPU.
        """
        if rows.is_cuda:
            raise ValueError(
                f"rows are on {rows.device}: the host would wait for the GPU twice in each {_BLOCK} elements; add them "
                f"by a kernel, with adds()"
            )
        if isinstance(at, torch.Tensor):
            self.additions += len(at)  # an index may come that often
            if (integers := self._integers(rows)) is not None:
                add_rows(shard, at, integers)
            return
        into, flat = shard[at : at + len(rows)].view(-1), rows.reshape(-1)
        for place, block in zip(into.split(_BLOCK), flat.split(_BLOCK), strict=True):
            if (integers := self._integers(block)) is not None:
                place.add_(integers)

    def adds(self) -> ExactAdds:
        """The arguments by which kernels add in this minibatch, while others may add too."""
        return ExactAdds(factor=2.0**self.exponent, largest=self.largest)

    def _integers(self, values: torch.Tensor) -> torch.Tensor | None:
        """trunc(values 2^e); None where one is not finite or too large, which `added` reports."""
        if values.numel() == 0:
            return None
        low, high = torch.aminmax(values)
        self._see(max(-low.item(), high.item()))  # NaN if there is one: aminmax gives it as both
        if not self._is_finite or self._bits > _MOST_BITS:
            return None
        return (values.float() * 2.0**self.exponent).long()

    def _see(self, largest: float) -> None:
        """`largest`: of some |values|."""
        if not math.isfinite(largest):
            self._is_finite = False
        elif largest > 0:
            self._bits = max(self._bits, math.frexp(largest)[1] + self.exponent)

    def added(self, largest: float = 0.0) -> Added:
        """By this rank. After a drain. `largest`: of all |g| that kernels have added."""
        self._see(largest)
        return self.additions, self._bits if self._is_finite else None

    def value(self, shard: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
        """Writes the sum into `into`, fp32, of as many elements, which may be the first half of the shard's memory.

        NaN if some rank has added what is not finite.
        """
        if self.is_nan:
            return into.fill_(math.nan)
        factor, elements = 2.0**-self.exponent, _BLOCK_ON_A_GPU if shard.is_cuda else _BLOCK
        for place, block in zip(into.view(-1).split(elements), shard.view(-1).split(elements), strict=True):
            place.copy_(block.float().mul_(factor))
        return into

    def settle(self, everyones: Sequence[Added]) -> str | None:
        """Chooses the next exponent by what all ranks have added. Returns why the sum can't be used, None if it can."""
        finite = [bits for _, bits in everyones if bits is not None]
        self.is_nan = len(finite) < len(everyones)
        if self.is_nan:
            return None
        additions, largest = sum(count for count, _ in everyones), max(finite)
        if largest == _ZERO:
            return None  # it keeps its exponent
        bits = largest + (additions - 1).bit_length()
        was_guess, self.is_guess = self.is_guess, False
        exponent = self.exponent + _WANTED_BITS - bits
        self.next_exponent = max(-_MOST_EXPONENT, min(exponent, _MOST_EXPONENT))
        if bits > _MOST_BITS:
            return f"its sum might need {bits} bits of {_MOST_BITS}"
        if was_guess and bits < _LEAST_BITS and self.exponent < self.next_exponent:
            return f"its sum has {max(bits, 0)} bits, and a first one must have {_LEAST_BITS}"
        return None


class ExactTarget(Target):
    """Gradient shards of integers."""

    def __init__(self, *, shards: Sequence[torch.Tensor], **how: Any) -> None:
        super().__init__(shards=shards, **how)
        self.sum = ExactSum(shards[0].device)
        self._value: torch.Tensor | None = None

    def add_into(self, shard: torch.Tensor, at: int | torch.Tensor, rows: torch.Tensor) -> None:
        if rows.dtype == shard.dtype:  # a sum, whose summands were counted
            super().add_into(shard, at, rows)
        else:
            self.sum.add(shard, at, rows)

    def begin_addition(self) -> None:
        self.sum.additions += 1

    def value(self, part: torch.Tensor) -> torch.Tensor:
        """fp32, in the first half of the part's memory."""
        if self._value is None:
            self._value = part.view(-1).view(torch.float32)[: part.numel()].view(part.shape)
        return self.sum.value(part, self._value)

    def adding(self, peers: PeerShards) -> PeerShards:
        return replace(peers, exact=self.sum.adds())


class ExactSums(Participant):
    """Of all shards that train: ranks compare their scales at the entry, and exchange what they added at the exit.

    What kernels see of all of them, `ExactSum.largest`, is one tensor: it is zeroed at once, and read at once.
    """

    name = "exact"
    saved_as = "odc_scales"

    def __init__(self, shards: Sequence[Shard], protocol: Protocol) -> None:
        """`shards`: of the engine; some may be added later."""
        self._shards, self._protocol = shards, protocol
        self._largest = torch.zeros(0)

    def _sums(self) -> dict[int, ExactSum]:
        """By their places among the shards."""
        trained = ((place, each) for place, each in enumerate(self._shards) if each.trains)
        targets = ((place, each.target) for place, each in trained if isinstance(each, HeapShard))
        return {place: target.sum for place, target in targets if isinstance(target, ExactTarget)}

    def entry(self, given: None) -> str:
        """A digest of all exponents."""
        return hashlib.sha256(repr(list(self.state().values())).encode()).hexdigest()[:16]

    def entered(self, messages: list[str]) -> None:
        if len(set(messages)) > 1:
            raise RanksDiffer(
                "the scales of exact sums are not the same on all ranks: load one checkpoint on all of them"
            )

    def opened(self) -> None:
        sums = self._sums().values()
        if len(sums) != len(self._largest):
            self._largest = torch.cat([each.largest for each in sums])
            for each, part in zip(sums, self._largest.split(1), strict=True):
                each.largest = part
        self._largest.zero_()
        for each in sums:
            each.clear()

    def exit(self) -> dict[str, Added]:
        """This rank's additions, by the places of the shards that it touched."""
        sums = self._sums()
        largest = dict(zip(sums, self._largest.view(torch.float32).tolist(), strict=True))
        return {str(place): each.added(largest[place]) for place, each in sums.items() if self._shards[place].touched}

    def settle(self, messages: list[dict[str, Added]] | None) -> None:
        """Raises MinibatchToRepeat if a sum does not fit its scale."""
        if messages is None:
            return
        refused = {}
        for place, each in self._sums().items():
            everyones = [theirs[key] for theirs in messages if (key := str(place)) in theirs]
            if everyones and (why := each.settle(everyones)) is not None:
                refused[self._shards[place].name] = why
        if refused:
            raise MinibatchToRepeat(self._protocol.number, refused)

    def state(self) -> dict[str, list[int]]:
        """The scales, by parameter: the bits of the next sums depend on them."""
        return {
            self._shards[place].name: [each.next_exponent, int(each.is_guess)] for place, each in self._sums().items()
        }

    def restore(self, state: dict[str, list[int]]) -> None:
        """Other parameters keep what they have."""
        for place, each in self._sums().items():
            if (scale := state.get(self._shards[place].name)) is not None:
                each.next_exponent, each.is_guess = int(scale[0]), bool(scale[1])
