"""Samples with a common prefix: the tokens that they share are computed once in each pack that has several of them.

In a pack a sample may *branch* from another at token `start`: only its tokens from `start` on are computed, and they
attend to the other's rows before `start`, which have the same tokens at the same positions. A branch begins with the
last shared token, as that predicts the first token that is not shared. So every target has a row of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from .cost import CostModel
from .entries import Entry
from .fields import IGNORED, IMAGE_FIELDS, TOKEN_TYPES
from .line import Strip, cut_line

LEAST_SHARED = 32  # tokens: computing fewer again takes no longer than reading them
_MEET = 4  # samples with a common prefix in an average minibatch: so many need not be kept together
_COMPARED = 1 << 24  # tokens that are held at a time
_MARKED = 8  # first tokens of a sample with images, which are compared together with a digest of these


@dataclass(frozen=True, slots=True)
class Relatives:
    """What samples share, as `find_relatives` finds it. By number of a sample, or where it is said by its place.

    lengths: their tokens.
    order: the samples in the order of their tokens. `place`: of each in it.
    shared: by place, the tokens that a sample shares with the one before it.
    free: the tokens before its first target, 0 if it has an image after that.
    contents: a hash of all that it shares with others.
    floors: the tokens up to and including its last image's.
    """

    lengths: list[int]
    order: list[int]
    shared: np.ndarray
    free: list[int]
    contents: list[str]
    floors: list[int]
    place: list[int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "place", sorted(range(len(self.order)), key=self.order.__getitem__))

    @classmethod
    def none(cls, lengths: list[int], floors: Sequence[int] | None) -> Relatives:
        """Of samples of these `lengths` that share nothing. `floors`: as of the class, by default 0."""
        order, nothing = [*range(len(lengths))], [0] * len(lengths)
        floors = nothing if floors is None else [*map(int, floors)]
        return cls(lengths, order, np.zeros(len(order), dtype=np.int64), nothing, [""] * len(order), floors)

    def entries(self, samples: Sequence[int]) -> list[Entry]:
        """These samples in one pack: whole, or as branches of others of them, which come before their branches."""
        (part,) = cut_line(self.strips(samples), [1.0], None)
        return part

    def strips(self, samples: Sequence[int]) -> list[Strip]:
        """For these samples, in the order of tokens, the tokens that none before has. `learned` is at most the first
        that predicts a target.
        """
        strips: dict[int, Strip] = {}
        before = None
        for place in sorted(self.place[sample] for sample in samples):
            sample = self.order[place]
            start = 0 if before is None else self._start(before, place)
            parent = None if before is None or not start else self.order[before]
            while parent is not None and strips[parent].start >= start:
                # Then that one's parent has all of these tokens.
                parent = strips[parent].parent
            learned = max(self.free[sample] - 1, 0)
            strip = Strip(sample, start, self.lengths[sample], parent, learned, self.floors[sample])
            strips[sample], before = strip, place
        return [*strips.values()]

    def families(self) -> list[list[Strip]]:
        """All samples, by prefix group: only the first of a group starts at 0."""
        found: list[list[Strip]] = []
        for strip in self.strips(self.order):
            if strip.start == 0:
                found.append([])
            found[-1].append(strip)
        return found

    def among(self, samples: Sequence[int]) -> Relatives:
        """The same for these samples only, all different, numbered by their index in `samples`."""
        order = sorted(range(len(samples)), key=lambda at: self.place[samples[at]])
        places = [self.place[samples[at]] for at in order]
        shared = np.zeros(len(order), dtype=np.int64)
        if len(order) > 1:
            after = [each + 1 for each in places]
            shared[1:] = np.minimum.reduceat(self.shared[: after[-1]], after[:-1])
        lengths, free, floors = ([of[at] for at in samples] for of in (self.lengths, self.free, self.floors))
        contents = [self.contents[at] for at in samples]
        return Relatives(lengths, order, shared, free, contents, floors)

    def family_numbers(self, *, most: int, common: float | None = None) -> list[int]:
        """By sample, the number of its prefix group, for an order of samples in which groups stay together.

        A group of more than `most` samples, a minibatch, is cut, in the order of tokens, into several of about equal
        size. A prefix of `common` samples or more makes no group, only longer prefixes do: by default so many that an
        average minibatch has 4 of them.
        """
        count = len(self.order)
        common = min(_MEET * count / most, count) if common is None else common
        starts = np.minimum(self.shared, np.asarray(self.free)[self.order])
        numbers, families = [0] * count, 0
        runs = [(0, count, 0)]  # of places, and the tokens that all of them share
        while runs:
            begin, stop, known = runs.pop()
            cuts = begin + 1 + np.flatnonzero(starts[begin + 1 : stop] < known + LEAST_SHARED)
            for first, end in pairwise([begin, *cuts.tolist(), stop]):
                size = end - first
                if size > 1 and size >= common:
                    runs.append((first, end, int(starts[first + 1 : end].min())))
                    continue
                parts = -(-size // most)
                for at in range(size):
                    numbers[self.order[first + at]] = families + at * parts // size
                families += parts
        return numbers

    def savings(self, cost: CostModel, *, token_cap: int) -> tuple[int, float]:
        """The tokens that need not be computed if each prefix group is in one pack, and their share of the cost of all.

        Samples are cut off at `token_cap`; those without a target before that are left out.
        """
        kept = [each for each in self.strips(self.order) if self.free[each.sample] < min(each.stop, token_cap)]
        costs = [cost.sequence(min(each.stop, token_cap)) for each in kept]
        saved = [cost.sequence(each.start) for each in kept]
        return sum(each.start for each in kept), sum(saved) / (sum(costs) or 1)

    def digest(self) -> str:
        """Equal if the samples and their common prefixes are."""
        found = [self.lengths, self.order, self.shared.tolist(), self.free, self.contents]
        return hashlib.sha256(repr(found).encode()).hexdigest()[:16]

    def _start(self, before: int, place: int) -> int:
        """The first token of the sample at `place` to compute if that at `before` is in the same pack; 0: all of it."""
        alike = min(int(self.shared[before + 1 : place + 1].min()), self.free[self.order[place]])
        return first_own(alike)


def first_own(alike: int) -> int:
    """The first token to compute of a sample that begins with `alike` tokens of another in its pack; 0: all of it."""
    return alike - 1 if alike >= LEAST_SHARED else 0  # each computes the last one


def find_relatives(samples: Sequence[Mapping[str, Any]], progress: Callable[[int], None] | None = None) -> Relatives:
    """Compares the samples' tokens, to compute once what they share.

    Only tokens that are not learned are shared: a sample without labels shares none. Samples with images share only if
    they begin with the same tokens and images (`pixel_values`, …) up to the first token after the last of these, which
    is the first place where they may differ. Samples are read one by one, those that begin alike more than once.

    samples: as `pack_collate` takes them, with `input_ids` and maybe `labels`.
    progress: is called with the number read so far.

    Returns what `MinibatchSampler(relatives=…)` takes.
    """
    count = len(samples)
    lengths, free, floors, order = [0] * count, [0] * count, [0] * count, list(range(count))
    shared = np.zeros(count, dtype=np.int64)
    read = 0

    def tokens_from(sample: int, start: int, most: int) -> bytes:
        nonlocal read
        each = samples[sample]
        if start == 0:
            lengths[sample], floors[sample] = len(each["input_ids"]), floor_of(each)
            targets = _before_targets(each.get("labels"))
            free[sample] = targets if targets > floors[sample] else 0
        if progress is not None:
            progress(read := read + 1)
        tokens = np.asarray(each["input_ids"][start : start + most]).astype(">i4")  # a copy
        if start == 0 and floors[sample]:
            tokens[:_MARKED] ^= np.frombuffer(_images_digest(each, floors[sample]), ">i4")[: len(tokens)]
        return tokens.tobytes()

    todo = [(0, count, 0)] if count else []  # of places whose samples share so many tokens
    while todo:
        first, end, start = todo.pop()
        most = max(LEAST_SHARED, _COMPARED // (end - first))
        keys = {sample: tokens_from(sample, start, most) for sample in order[first:end]}
        order[first:end] = sorted(order[first:end], key=keys.__getitem__)
        begin = first  # of samples with equal keys
        for at in range(first + 1, end + 1):
            one, other = keys[order[at - 1]], keys[order[at]] if at < end else None
            if one == other and len(one) == 4 * most:
                continue
            if at - begin > 1:
                todo.append((begin, at, start + most))
            begin = at
            if other is not None:
                shared[at] = start + _common(one, other)
    found = Relatives(lengths, order, shared, free, [""] * count, floors)
    for sample, at in enumerate(found.place):
        most = int(shared[at : at + 2].max())
        if most >= LEAST_SHARED:
            found.contents[sample] = hashlib.sha256(tokens_from(sample, 0, most)).hexdigest()[:16]
    return found


def floor_of(sample: Mapping[str, Any]) -> int:
    """The tokens of a sample, as `pack_collate` takes it, up to and including its last image's; 0 without images."""
    if sample.get("pixel_values") is None:
        return 0
    types = next((sample[name] for name in TOKEN_TYPES if sample.get(name) is not None), ())
    return int(np.flatnonzero(types).max(initial=-1)) + 1


def _images_digest(sample: Mapping[str, Any], floor: int) -> bytes:
    """32 bytes: of the images, and of the tokens up to the first after them."""
    found = hashlib.sha256(np.asarray(sample["input_ids"][: floor + 1], dtype=">i4").tobytes())
    for name in IMAGE_FIELDS:
        if (value := sample.get(name)) is not None:
            values = np.ascontiguousarray(value.float() if hasattr(value, "float") else value)  # numpy has no bf16
            found.update(f"{name} {floor} {values.dtype} {values.shape}".encode())
            found.update(values.data)
    return found.digest()


def _before_targets(labels: Any) -> int:
    if labels is None:
        return 0
    learned = np.asarray(labels)[1:] != IGNORED
    return int(learned.argmax()) + 1 if learned.any() else len(labels)


def _common(one: bytes, other: bytes) -> int:
    """The tokens of 4 bytes with which both begin."""
    least = min(len(one), len(other)) // 4
    differ = np.frombuffer(one, np.int32, least) != np.frombuffer(other, np.int32, least)
    return int(differ.argmax()) if differ.any() else least
