"""The order of an epoch's samples: a shuffle of those taken from each data set."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

_LOOKED_AHEAD = 64  # prefix groups, for one that fits


def shuffled(count: int, seed: str) -> list[int]:
    """0 to `count` - 1 in an order determined by `seed`, the same in every Python."""
    generator = random.Random(seed)  # only its `random` is stable across versions; `shuffle` is not
    keys = [generator.random() for _ in range(count)]
    return sorted(range(count), key=keys.__getitem__)


def in_families(order: Sequence[int], family: Sequence[int], *, most: int, seed: str) -> list[int]:
    """`order`, with samples of equal `family`, a prefix group, next to each other, and the groups shuffled by `seed`.

    Every `most` samples are a minibatch. A group that does not fit into the rest of one waits if a later one does.
    """
    members: dict[int, list[int]] = {}
    for sample in order:
        members.setdefault(family[sample], []).append(sample)
    families = [*members.values()]
    waiting = deque(families[at] for at in shuffled(len(families), seed))
    found: list[int] = []
    while waiting:
        room = most - len(found) % most
        fitting = (at for at, each in enumerate(islice(waiting, _LOOKED_AHEAD)) if len(each) <= room)
        at = next(fitting, 0)
        found += waiting[at]
        del waiting[at]
    return found


@dataclass(frozen=True)
class Mix:
    """The number of times that an epoch takes each sample of several data sets.

    With weight 2 an epoch takes every sample of the set twice. With weight 0.5 it takes half of them, and the next
    epoch the other half: each set is a fixed shuffled ring; an epoch takes the next `taken` samples of it. So all
    epochs have the same size, and the counts of a set's samples differ by at most one after any number of epochs.

    Samples are numbered one set after the other. A set whose samples an epoch takes more than once has several numbers
    for each, `copies`, so that no number occurs twice in an epoch: packs and segments identify samples by number.

    sizes: samples of each set.
    weights: of each set, by default 1.

    Raises ValueError for weights that don't match the sets, are not positive, or take no sample.
    """

    sizes: tuple[int, ...]  # samples of each set
    weights: tuple[float, ...] = ()  # by default 1 for each set
    taken: tuple[int, ...] = field(init=False)  # samples of each set in an epoch
    copies: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        weights = self.weights or (1.0,) * len(self.sizes)
        if len(weights) != len(self.sizes):
            raise ValueError(f"there are {len(weights)} weights and {len(self.sizes)} data sets: give one for each set")
        for weight in weights:
            if not 0 < weight < math.inf:
                raise ValueError(f"a data set's weight is {weight}; it must be positive and finite")
        taken = tuple(math.floor(weight * size + 0.5) for weight, size in zip(weights, self.sizes, strict=True))
        for weight, size, count in zip(weights, self.sizes, taken, strict=True):
            if not count:
                raise ValueError(f"weight {weight} takes none of a data set's {size} samples in an epoch: raise it")
        object.__setattr__(self, "weights", weights)
        object.__setattr__(self, "taken", taken)
        object.__setattr__(self, "copies", tuple(-(-n // size) for n, size in zip(taken, self.sizes, strict=True)))

    def __len__(self) -> int:
        """Samples in an epoch."""
        return sum(self.taken)

    @property
    def numbers(self) -> int:
        """The count of samples' numbers, copies included."""
        return sum(size * copies for size, copies in zip(self.sizes, self.copies, strict=True))

    def order(self, epoch: int, seed: str) -> list[int]:
        """The numbers of the samples that an epoch takes, from 0, in the order of a shuffle by `seed`."""
        chosen: list[int] = []
        begin = 0
        for place, (size, count, copies) in enumerate(zip(self.sizes, self.taken, self.copies, strict=True)):
            whole, rest = divmod(count, size)
            chosen += range(begin, begin + whole * size)
            if rest:
                own = shuffled(size, f"{seed} set {place}")
                chosen += (begin + whole * size + own[(epoch * rest + each) % size] for each in range(rest))
            begin += copies * size
        return [chosen[place] for place in shuffled(len(chosen), f"{seed} {epoch}")]


def in_passes(mix: Mix, step: int, count: int, *, seed: str) -> list[int]:
    """What step `step`, from 0, takes: the next `count` of one epoch after another."""
    places = range(step * count, (step + 1) * count)
    orders = {epoch: mix.order(epoch, seed) for epoch in {place // len(mix) for place in places}}
    return [orders[place // len(mix)][place % len(mix)] for place in places]
