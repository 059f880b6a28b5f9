"""Drawn minibatches: plain data, the same in every run and every Python. What the planners make of them is recorded.

Only a generator's `random()` is the same in all versions, and libm's functions differ in their last bits.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

COUNT, GROUP = 5_000, 50  # cases, and those of a group, which have one kind
KINDS = ("strategies", "split", "relatives", "queue", "epochs", "wrong", "split", "relatives", "strategies", "wrong")
GROUPS = {f"{group} {KINDS[group % len(KINDS)]}": group for group in range(COUNT // GROUP)}
Given = dict[str, Any]

# The first half of the groups have costs whose sums are exact, as `sum` rounds otherwise from Python 3.12 on.
EXACT = COUNT // GROUP // 2
_EXACT = (
    {"quadratic": 2.0**-28, "linear": 2.0**-12},
    {"quadratic": 1.5, "linear": 1000.25, "microbatch": 50_000.0, "head": 125.5},
    {"quadratic": 0.0, "linear": 1.0, "microbatch": 20.0, "head": 0.25},
    {"quadratic": 1.0, "linear": 0.0},
)
_REAL = (
    {"quadratic": 4.348 / 32000**2, "linear": 8.768 / 32000},
    {"quadratic": 0.3, "linear": 1000.1, "microbatch": 50_000.7, "head": 125.3},
)


@dataclass(frozen=True)
class Case:
    """`given`: of a minibatch, the samples' `names`, and in their order `lengths`, `extra` and `floors`; of relatives
    the `samples` that the names number; and what planners take. Of epochs, what `MinibatchSampler` takes.
    """

    number: int
    kind: str
    given: Mapping[str, Any]


def draws(count: int = COUNT, start: int = 0) -> Iterator[Case]:
    for number in range(start, start + count):
        draw, group = _Draw(number), number // GROUP
        kind = KINDS[group % len(KINDS)]
        is_big = number % GROUP == GROUP - 1 and group >= len(KINDS)  # each kind's first group is quick
        yield Case(number, kind, MappingProxyType(_wrong(draw) if kind == "wrong" else _right(draw, kind, is_big)))


class _Draw:
    def __init__(self, number: int) -> None:
        self.random = random.Random(f"minibatch {number}").random
        self.costs = _EXACT if number < EXACT * GROUP else _REAL

    def below(self, stop: int) -> int:
        return int(self.random() * stop)

    def chance(self, of: float) -> bool:
        return self.random() < of

    def one(self, *of: Any) -> Any:
        return of[self.below(len(of))]

    def shuffled(self, count: int) -> list[int]:
        keys = [self.random() for _ in range(count)]
        return sorted(range(count), key=keys.__getitem__)

    def length(self, longest: int) -> int:
        """Long-tailed: half of them are below a 25th of the longest."""
        return max(1, int(longest * 0.02 / (1 - self.random() * 0.98)))

    def lengths(self, count: int) -> list[int]:
        longest = self.one(40, 400, 3000, 20_000)
        return [longest] * count if self.chance(0.06) else [self.length(longest) for _ in range(count)]

    def tokens(self, count: int) -> tuple[int, ...]:
        first, step = self.below(997), 1 + self.below(996)
        return tuple((first + step * at) % 997 for at in range(count))

    def images(self, lengths: Sequence[int], cost: Mapping[str, float]) -> Given:
        """Half of the minibatches have none, and half of the samples of the others."""
        if self.chance(0.5):
            return {"extra": None, "floors": None}
        most, part = max(lengths, default=1), self.one(0.1, 0.5, 1.0)
        unit, tokens = cost["quadratic"] * most + cost["linear"], most * self.one(0.01, 0.3, 2.0)
        have = [(self.chance(0.5), length) for length in lengths]
        extra = tuple(unit * int(tokens * self.random()) if has else 0.0 for has, _ in have)
        return {"extra": extra, "floors": tuple(int(n * part * self.random()) if has else 0 for has, n in have)}


def _right(draw: _Draw, kind: str, is_big: bool = False) -> Given:
    if kind == "epochs":
        return _epochs(draw)
    ranks = 64 if is_big else draw.one(1, 2, 2, 3, 4, 4, 5, 8, 8, 16)
    count = ranks * (draw.one(1, 2) if is_big else draw.one(1, 1, 2, 2, 3, 4, 6, 12))
    count -= draw.below(ranks + 1) if draw.chance(0.3) else 0
    samples, lengths, numbers = None, draw.lengths(count), [3 * at + 1 for at in range(count)]
    if kind == "relatives":
        samples = _samples(draw, min(count, 48) + draw.one(0, 0, 1, 9))  # of a larger data set
        numbers = range(len(samples))
    names = tuple(numbers[at] for at in draw.shuffled(len(numbers))[: min(count, 48) if samples else count])
    if samples is not None:
        lengths = [len(samples[name]["input_ids"]) for name in names]
    most, cost = max(lengths, default=8), draw.one(*draw.costs)
    given = {"planner": kind, "ranks": ranks, "names": names, "lengths": tuple(lengths), "samples": samples}
    given |= {"cost": cost, **draw.images(lengths, cost), "token_cap": int(most * draw.one(1, 1, 1.2, 2, 4))}
    given |= {"balance": "queue" if kind == "queue" else "mini", "tokens": 0, "shared_tokens": None, "replicas": 1}
    if kind == "strategies":
        return given | {"balance": draw.one("mini", "micro", "global", "local")}
    if kind != "queue" or draw.chance(0.5):
        given["token_cap"] = int(most * draw.one(0.3, 0.5, 0.8, 1, 1, 1.5, 4)) or 1
        given["tokens"] = draw.one(0, 64, most // 4, most // 2, most, 3 * most)
        given["shared_tokens"] = draw.one(None, None, 0, most)
    if ranks % 2 == 0 and draw.chance(0.1 if kind == "queue" else 0.35):
        given["replicas"] = draw.one(2, 2, ranks // 2)
    return given


def _samples(draw: _Draw, count: int) -> tuple[Given, ...]:
    """Groups of completions, turns of conversations, trees, duplicates and samples alone, some with an image."""
    found: list[Given] = []
    while len(found) < count:
        prompt, image = draw.tokens(20 + draw.length(700)), {}
        if draw.chance(0.25):
            before = draw.below(len(prompt) - 10)
            image = {"pixel_values": ((draw.below(8) / 8, 0.5),), "mm_token_type_ids": (0,) * before + (1,) * 9}
        shape = draw.one("group", "group", "turns", "tree", "duplicates", "alone")
        for _ in range(1 if shape == "alone" else draw.one(2, 4, 8, 16)):
            ids = prompt + draw.tokens(0 if shape == "duplicates" else draw.one(1, 20, draw.length(1500)))
            sample = {"input_ids": ids, "labels": (-100,) * len(prompt) + ids[len(prompt) :]}
            if image:
                types = image["mm_token_type_ids"]
                sample |= image | {"mm_token_type_ids": types + (0,) * (len(ids) - len(types))}
            found.append(sample | ({"labels": None} if draw.chance(0.04) else {}))
            if shape == "turns" or (shape == "tree" and draw.chance(0.4)):
                prompt = ids + draw.tokens(draw.one(3, 40))
    return tuple(found[at] for at in draw.shuffled(len(found))[:count])


def _epochs(draw: _Draw) -> Given:
    world, per_rank, cost = draw.one(1, 2, 2, 4), draw.one(1, 2, 3), draw.one(*draw.costs)
    count = int(world * per_rank * (1 + 3 * draw.random()))
    balance = draw.one("mini", "mini", "mini", "queue", "micro", "global", "local")
    samples, mix, lengths = None, None, draw.lengths(count)
    if balance == "mini" and draw.chance(0.4):
        samples = _samples(draw, count)
        lengths = [len(each["input_ids"]) for each in samples]
    elif draw.chance(0.3):
        mix = {"sizes": (1 + draw.below(count), count), "weights": draw.one((1.0, 1.0), (2.0, 1.0), (1.5, 0.75))}
        copies = [math.ceil(int(weight * size + 0.5) / size) for size, weight in zip(*mix.values(), strict=True)]
        lengths = draw.lengths(sum(n * size for n, size in zip(copies, mix["sizes"], strict=True)))
    images = draw.images(lengths, cost) | ({} if samples is None else {"floors": None})
    is_split, most = balance in ("mini", "queue") and draw.chance(0.5), max(lengths)
    options = {"samples_per_rank": per_rank, "balance": balance, "seed": draw.below(100), "world": world, **images}
    options |= {"token_cap": int(most * (draw.one(0.6, 0.9, 1) if is_split else draw.one(1, 1.5, 3)))}
    options |= {"split": is_split and draw.one(True, True, most // 2, 3 * most), "drop_last": draw.chance(0.5)}
    options |= {"replicas": 2 if world == 4 and balance == "mini" and draw.chance(0.3) else 1}
    given = {"lengths": tuple(lengths), "samples": samples, "asked": tuple(range(world)), "stop": draw.below(4)}
    return given | {"options": options, "mix": mix, "cost": cost, "state": {}}  # what is loaded but what was saved


def _wrong(draw: _Draw) -> Given:
    """One value is wrong; in some cases it does not matter."""
    given = {"lengths": ()}
    while not given["lengths"]:
        given = _right(draw, draw.one("strategies", "split", "relatives", "queue", "epochs", "epochs"))
    options = given.get("options", given)
    lengths, cap, kind = given["lengths"], options["token_cap"], given.get("planner")
    ranks = given.get("ranks") or options["world"]

    def changed(field: str, nothing: Any, *values: Any) -> Given:
        all_of = options.get(field) or (nothing,) * len(lengths)
        at = draw.below(len(all_of))
        wrong = (*all_of[:at], draw.one(*values), *all_of[at + 1 :])
        return {field: draw.one(wrong, wrong, wrong, all_of[1:], (*all_of, nothing))}

    at, over = draw.below(len(lengths)), draw.one(cap + 1, cap * ranks + 1)
    length = {"lengths": (*lengths[:at], draw.one(0, -3, over, over, 2.5, "7", None), *lengths[at + 1 :])}
    extra = changed("extra", 0.0, math.nan, math.inf, -math.inf, -0.5)
    floor = changed("floors", 0, -1, max(lengths) + 1, math.nan)
    tokens, replicas = {"tokens": -1}, {"replicas": draw.one(0, ranks + 1)}
    wrong = [{"token_cap": draw.one(0, -5)}, {"cost": {"quadratic": draw.one(-1.0, math.nan, 0.0), "linear": 0.0}}]
    wrong += [extra, {"ranks": draw.one(0, -1)}]
    if kind == "relatives":
        others = {"lengths": draw.one(lengths[1:], (*lengths[1:], lengths[0] + 1))}
        empty = {"samples": ({"input_ids": (), "labels": ()},) * len(given["samples"])}
        return given | draw.one(*wrong, others, empty, tokens, replicas)
    if kind == "strategies":
        few = {"balance": draw.one("micro", "global"), "token_cap": max(lengths)}  # samples, for the packs
        few |= {"names": given["names"][1:], "lengths": lengths[1:] or lengths, "extra": None}
        return given | draw.one(*wrong, length, length, length, few, few, {"balance": draw.one("even", None)})
    if kind is not None:
        return given | draw.one(*wrong, length, length, length, *([floor, floor, tokens, replicas] * (kind == "split")))
    wrong = [extra, extra, floor, floor, {"world": 0}, {"samples_per_rank": draw.one(0, 1.5, 1000)}, replicas]
    wrong += [{"token_cap": draw.one(0, max(lengths) // 9)}, {"balance": draw.one("even", "micro", "queue")}]
    wrong += [{"split": draw.one("yes", -1, None, 1)}, {"drop_last": False, "balance": "micro", "split": False}]
    if draw.chance(0.6):
        return given | {"options": options | draw.one(*wrong)}
    weights = draw.one((), (1.0,), (0.0, 1.0), (1.0, 0.2))
    state = {draw.one("samples", "samples_per_minibatch", "relatives", "other"): draw.one(1, "x", None)}
    mix, place = {"sizes": (len(lengths), 1), "weights": weights}, {"epoch": draw.one(-1, 3), "minibatch": 99}
    wrong = [length, length, {"lengths": lengths[1:]}, {"asked": (ranks, -1)}, {"mix": mix}]
    return given | draw.one(*wrong, {"cost": None}, {"state": state}, {"state": place})
