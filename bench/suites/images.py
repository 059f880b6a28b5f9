"""Vision-language models on two real ranks: FSDP2 with dummy images and ours, balanced in three ways.

    python -m bench.suites.images bench/results/images.json [--rounds 23]

The mixture is bench/data/images.json. Each way with packs at its best pack size of a few, found on the first
minibatches; then all in turn, minibatch by minibatch, with the optimizer step. Before that all compute the same
gradient, or it raises. Bounds are FLOPs: FSDP2's ranks wait for each other in each microbatch, in the tower and in the
text's layers; ours once, for the fuller rank. FSDP2 also sends parameters in each microbatch: how much slower that is
where no rank waits is measured on balanced work, the same samples on all ranks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from odc_triton.jobs.reports.report import table

from .. import quiet
from ..demo import RANKS, WARM_UP
from ..harness import Measured, assign_packs, disturbed, median_ratio, single_thread_environment
from ..images_data import AT_ENDS, BY_TEXT, CONFIG, DUMMIES, FILE, MINIBATCHES, PATCH_VALUES, SAMPLES, ImageWork, read
from ..provenance import options_of, save_measured, save_parts
from ..variants import Fsdp2, Fsdp2NoReshard, Odc, Variant
from .prefixes import Arm, memory, run

MOST_APART = 5e-6  # of gradients, in fp32
PACKS = (1, 2, 4)  # times the longest sample
SWEPT = 6  # minibatches, to find a way's best pack size, and of balanced work
COUNTED_RANKS = (8, 16)


class Fsdp2Dummies(Fsdp2):
    name = "FSDP2 + dummy images + global packing"
    balance = "global" + DUMMIES


class Fsdp2DummiesNoReshard(Fsdp2NoReshard):
    name = "FSDP2 no reshard + dummy images + LB-Mini"
    balance = "mini" + AT_ENDS


class Fsdp2Unbalanced(Fsdp2):
    """One sample a microbatch, each rank the samples that it happens to have."""

    name = "FSDP2 + dummy images, not balanced"
    balance = "local" + DUMMIES


class OdcUnbalanced(Odc):
    name = "ODC, not balanced"
    balance = "local"


class OdcByText(Odc):
    name = "ODC + LB-Mini by tokens"
    balance = "mini" + BY_TEXT


PACKED = (Fsdp2Dummies, Fsdp2DummiesNoReshard, OdcByText, Odc)
UNPACKED = (Fsdp2Unbalanced, OdcUnbalanced)


def work_of(minibatches: int, ranks: int = RANKS) -> ImageWork:
    """With the samples per rank that two ranks have."""
    samples, total = SAMPLES // RANKS * ranks, sum(map(len, read()))
    drawn = [[*range(first, first + samples)] for first in range(0, total - samples + 1, samples)][:minibatches]
    work = ImageWork(dataset=str(FILE), config=CONFIG, minibatches=drawn, token_cap=0)
    return replace(work, token_cap=max(work.data().lengths))


def flops(arm: Arm, work: ImageWork, ranks: int = RANKS) -> float:
    """Of what no rank can do before another's, over all minibatches that count. Heads compute learned tokens only."""
    (kind, cap), cost, tower, data, total = arm, work.cost(), work.tower(), work.data(), 0.0
    for samples in work.minibatches[WARM_UP:]:
        of_ranks: list[list[tuple[float, float]]] = []  # text and tower of each microbatch
        for packs in assign_packs(replace(work, token_cap=cap), data, samples, kind.balance, cost, ranks=ranks):
            of_ranks.append([])
            for pack in packs:
                lengths = [stop - start for start, stop in pairwise(pack["cu_seq_lens_q"].tolist())]
                text = cost.pack(lengths) - cost.head * (sum(lengths) - len(pack["target_positions"]))
                grids = pack["image_grid_thw"].prod(1).tolist() if "image_grid_thw" in pack else []
                of_ranks[-1].append((text, tower.sample([patches * PATCH_VALUES for patches in grids])))
        if kind in (Fsdp2Dummies, Fsdp2Unbalanced):
            total += float(np.max(of_ranks, axis=0).sum())
        else:
            total += max(float(np.sum(own)) for own in of_ranks)
    return total


def counted(work: ImageWork, ranks: int = RANKS) -> dict[Arm, float]:
    arms = [(kind, work.token_cap * most) for most in PACKS for kind in PACKED]
    return {arm: flops(arm, work, ranks) for arm in [*arms, *((kind, work.token_cap) for kind in UNPACKED)]}


def ours_of(kind: type[Variant]) -> type[Variant]:
    """What a way is compared with."""
    return OdcUnbalanced if kind in UNPACKED else Odc


def bounds(of: dict[Arm, float]) -> dict[str, float]:
    """By way, at its best pack size."""
    least = {kind: min(value for (other, _), value in of.items() if other is kind) for kind, _ in of}
    return {kind.name: value / least[ours_of(kind)] for kind, value in least.items()}


def times(arms: Sequence[Arm], results: Sequence[Measured]) -> dict[Arm, list[float]]:
    return {arm: each.seconds[WARM_UP:] for arm, each in zip(arms, results, strict=True)}


def measure(work: ImageWork, of: dict[Arm, float]) -> dict[str, Any]:
    """`of`: what is counted."""
    first = replace(work, minibatches=work.minibatches[: WARM_UP + SWEPT])
    packed = [arm for arm in of if arm[0] in PACKED]
    swept = times(packed, run(packed, first))
    best = [min((a for a in swept if a[0] is kind), key=lambda a: statistics.median(swept[a])) for kind in PACKED]
    arms = [*best, *((kind, work.token_cap) for kind in UNPACKED)]
    even = times(arms, run(arms, replace(first, even=True)))
    results = run(arms, work, MOST_APART)
    seconds, rows = times(arms, results), []
    for arm in arms:
        ours = next(other for other in arms if other[0] is ours_of(arm[0]))
        ratio, bound = median_ratio(seconds[arm], seconds[ours]), of[arm] / of[ours]
        row = {"name": arm[0].name, "token_cap": arm[1], "over": ours[0].name, **ratio, "bound": bound}
        row |= {"share_of_bound": ratio["ratio"] / bound, "even": median_ratio(even[arm], even[ours])["ratio"]}
        rows.append(row | {"seconds": seconds[arm], "memory_bytes": memory(arm, work)})
    gains = [theirs / ours for theirs, ours in zip(seconds[best[0]], seconds[best[-1]], strict=True)]
    median = WARM_UP + gains.index(statistics.median_low(gains))
    return {
        "arms": rows,
        "events": {r.name: [e.as_row() for e in r.events if e.minibatch == median] for r in (results[0], results[3])},
        "swept": {f"{kind.name}, {cap}": took for (kind, cap), took in swept.items()},
        "gradients_apart": max(each.apart for each in results),
        "disturbed": disturbed(results, WARM_UP),
    }


COLUMNS = ("", "pack size", "s per minibatch", "its time over", "", "95% interval", "bound", "balanced work", "peak MB")


def words(of: dict[str, Any]) -> list[str]:
    ratio = (f"{of['ratio']:.3f}", f"{of['low']:.3f} to {of['high']:.3f}", f"{of['bound']:.3f}", f"{of['even']:.3f}")
    took, peak = f"{statistics.median(of['seconds']):.2f}", f"{of['memory_bytes'] / 1e6:.0f}"
    return [of["name"], str(of["token_cap"]), took, of["over"], *ratio, peak]


def main() -> None:
    options = options_of(__doc__, out="out", rounds=MINIBATCHES - WARM_UP)
    single_thread_environment()
    start_s, work = time.monotonic(), work_of(WARM_UP + options.rounds)
    of = counted(work)
    more = [{"ranks": ranks, **bounds(counted(work_of(MINIBATCHES, ranks), ranks))} for ranks in COUNTED_RANKS]
    save_parts(options.out, bounds=[{"ranks": RANKS, **bounds(of)}, *more])  # before anything is measured
    found = measure(work, of)
    save_measured(options.out, start_s, cpu=found)
    print(quiet.in_words(found["disturbed"], options.rounds))
    print(table([words(arm) for arm in found["arms"]], COLUMNS))


if __name__ == "__main__":
    main()
