"""Exact sums in the minibatch protocol: their scales, and what happens where a sum does not fit its scale."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from ..base.errors import MinibatchToRepeat, RanksDiffer
from .exact import Added, ExactSum
from .participant import Participant
from .protocol import Protocol
from .shard import HeapShard


class ExactSums(Participant):
    """Of all shards that train: ranks compare their scales at the entry, and exchange what they added at the exit.

    What kernels see of all of them, `ExactSum.largest`, is one tensor: it is zeroed at once, and read at once.
    """

    name = "exact"
    saved_as = "odc_scales"

    def __init__(self, shards: Sequence[HeapShard], protocol: Protocol) -> None:
        """`shards`: of the engine; some may be added later."""
        self._shards, self._protocol = shards, protocol
        self._largest = torch.zeros(0)

    def _sums(self) -> dict[int, ExactSum]:
        """By their places among the shards."""
        return {place: shard.target.sum for place, shard in enumerate(self._shards) if shard.trains}

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
