"""Shared-prefix trees over three ranks, for tests: what a segment reads, told from the packs alone; samples that share
tokens; ways to assign them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from odc_triton.plan.entries import Entry, Segment

Deal = list[list[list[Entry]]]  # by rank and pack


def reads(segments: Iterable[Segment], segment: Segment) -> dict[Segment, tuple[int, int]]:
    """Of `segments`, those that hold tokens before `segment`, and which: from, up to. They are of its sample, and of
    the samples that this branches from.
    """
    by_sample: dict[int, list[Segment]] = {}
    for each in sorted(segments, key=lambda each: each.start):
        by_sample.setdefault(each.sample, []).append(each)
    found: dict[Segment, tuple[int, int]] = {}
    sample, stop = segment.sample, segment.start
    while sample is not None:
        own = by_sample[sample]
        found |= {each: (each.start, min(each.stop, stop)) for each in own if each.start < stop}
        sample, stop = own[0].parent, min(stop, own[0].start)
    return found


@dataclass(frozen=True, kw_only=True)
class Sample:
    """`ids`, of which those from `learned` on are learned. Its first `shares` tokens are those of sample `parent`."""

    ids: tuple[int, ...]
    learned: int
    parent: int | None = None
    shares: int = 0


def tokens(count: int, seed: int) -> tuple[int, ...]:
    return tuple(torch.randint(3, 97, (count,), generator=torch.Generator().manual_seed(seed)).tolist())


def family(shape: str, seed: int = 0) -> list[Sample]:
    """The samples of one of SHAPES; others with each seed. A parent comes before its branches."""
    made: list[Sample] = []

    def add(parent: int | None, shares: int, *parts: int) -> int:
        """`parts`: tokens of its own that are not learned, and those that are, after what it shares."""
        of = () if parent is None else made[parent].ids[:shares]
        ids = of + tokens(sum(parts), 100 * seed + len(made))
        made.append(Sample(ids=ids, learned=len(ids) - parts[-1], parent=parent, shares=shares))
        return len(made) - 1

    SHAPES[shape](made, add)
    return made


def _group(made: list[Sample], add: Callable) -> None:
    first = add(None, 0, 14, 5)
    for count in (9, 1, 7):
        add(first, 14, 0, count)


def _three_levels(made: list[Sample], add: Callable) -> None:
    one = add(None, 0, 17, 6)
    add(one, 17, 0, 4)
    other = add(one, 11, 8, 5)
    add(other, 19, 0, 7)
    add(one, 11, 0, 3)


def _turns(made: list[Sample], add: Callable) -> None:
    """What was thought in a turn is left out in the next one's history."""
    turn = add(None, 0, 12, 7)
    for count in (6, 4, 5):
        turn = add(turn, made[turn].learned, 5, count)


def _prefix(made: list[Sample], add: Callable) -> None:
    """Sample 1 begins with all of sample 0, and is the beginning of sample 2, which learns what it learned."""
    first = add(None, 0, 12, 5)
    second = add(first, 17, 0, 6)
    add(second, 17, 0, 4)
    third = made.pop()
    made.append(replace(third, ids=made[second].ids + third.ids[17:], learned=17))


def _duplicates(made: list[Sample], add: Callable) -> None:
    first = add(None, 0, 13, 6)
    for _ in range(2):
        made.append(replace(made[first], parent=first, shares=13))


def _nothing(made: list[Sample], add: Callable) -> None:
    for count in (6, 9, 3):
        add(None, 0, 13, count)


SHAPES: dict[str, Callable[[list[Sample], Callable], None]] = {
    "a group": _group,
    "three levels": _three_levels,
    "turns": _turns,
    "another's prefix": _prefix,
    "duplicates": _duplicates,
    "nothing shared": _nothing,
}


class Grown:
    """Entries of samples numbered from `first`: a sample that shares a prefix is a segment, of which the last shared
    token is computed again; `cut` has some in two.
    """

    def __init__(self, samples: list[Sample], first: int) -> None:
        self.entries: list[Entry] = []
        parents = {each.parent for each in samples}
        for at, each in enumerate(samples):
            stop = len(each.ids)
            if each.parent is not None:
                parent = each.parent  # that computes the token before
                while samples[parent].shares >= each.shares:
                    parent = samples[parent].parent
                self.entries.append(Segment(first + at, each.shares - 1, stop, first + parent))
            else:
                self.entries.append(Segment(first + at, 0, stop) if at in parents else first + at)
        self.samples, self.first = samples, first

    def cut(self, at: int) -> list[Segment]:
        """Entry `at` in two segments; in its middle, but before what is learned if it shares nothing."""
        sample, of = self.samples[at], self.entries[at]
        segment = of if isinstance(of, Segment) else Segment(of, 0, len(sample.ids))
        stop = sample.learned // 2 if segment.parent is None else (segment.start + segment.stop + 1) // 2
        return self.cut_at(at, stop) if segment.start < stop < segment.stop else [of]

    def cut_at(self, at: int, *stops: int) -> list[Segment]:
        """Entry `at` in segments."""
        of = self.entries[at]
        segment = of if isinstance(of, Segment) else Segment(of, 0, len(self.samples[at].ids))
        edges = pairwise([segment.start, *stops, segment.stop])
        return [
            replace(segment, start=a, stop=b, parent=segment.parent if a == segment.start else None) for a, b in edges
        ]


def _here_and_there(one: Grown, other: Grown, whole: list[int]) -> Deal:
    root, *others = one.entries
    return [[[root]], [others[::2]], [others[1::2]]]


def _cut_completions(one: Grown, other: Grown, whole: list[int]) -> Deal:
    """What is learned of two samples is on two and on three ranks."""
    *others, last = one.entries[1:]
    first, second = one.cut_at(0, one.samples[0].learned + 2)
    start = 0 if isinstance(last, int) else last.start
    third = (len(one.samples[-1].ids) - start) // 3
    a, b, c = one.cut_at(len(one.entries) - 1, *(len(one.samples[-1].ids) - third * n for n in (2, 1)))
    return [[[first, b, *others[1::2]]], [[second, a]], [[*others[::2], c]]]


def _two_trees(one: Grown, other: Grown, whole: list[int]) -> Deal:
    """Each rank reads from each other one."""
    (a, *of_a), (b, *of_b) = one.entries, other.entries
    return [[[a, *of_b[::2]]], [[b, *of_a[::2]]], [[*of_b[1::2], *of_a[1::2]]]]


def _two_waves(one: Grown, other: Grown, whole: list[int]) -> Deal:
    (a, *of_a), (b, *of_b) = one.entries, other.entries
    return [[[a], of_b[::2]], [of_a[::2], [b]], [of_a[1::2], whole, of_b[1::2]]]


def _mixed(one: Grown, other: Grown, whole: list[int]) -> Deal:
    """Unsplit samples with segments and in packs of their own; branches in the packs of their parents."""
    root, *others = one.entries
    half = len(others) // 2
    return [[[whole[0], root]], [others[half:], whole[1:2]], [[*others[:half], *whole[2:]]]]


def _on_replicas(one: Grown, other: Grown, whole: list[int]) -> Deal:
    """Of four ranks, a tree on each two."""
    first, second = one.cut(0)
    root, *others = other.entries
    return [[[first]], [[second, *one.entries[1:]]], [others, whole], [[root]]]


DEALS: dict[str, Callable[[Grown, Grown, list[int]], Deal]] = {
    "here and there": _here_and_there,
    "cut completions": _cut_completions,
    "two trees in a wave": _two_trees,
    "two waves": _two_waves,
    "mixed": _mixed,
    "on two replicas": _on_replicas,
}


def dealt(shape: str, deal: str) -> tuple[list[Sample], Deal]:
    """The samples of two trees and three others, and the packs with those of them that the deal has, renumbered."""
    first, second, alone = family(shape, 1), family(shape, 2), family("nothing shared", 3)
    samples = first + second + alone
    two = Grown(first, 0), Grown(second, len(first))
    packs = DEALS[deal](*two, list(range(len(first + second), len(samples))))
    used = sorted({each.sample if isinstance(each, Segment) else each for of in packs for pack in of for each in pack})
    number = {sample: at for at, sample in enumerate(used)}

    def renamed(each: Entry) -> Entry:
        if not isinstance(each, Segment):
            return number[each]
        return replace(each, sample=number[each.sample], parent=number.get(each.parent))

    packs = [[[*map(renamed, pack)] for pack in of if pack] for of in packs]
    return [samples[at] for at in used], packs
