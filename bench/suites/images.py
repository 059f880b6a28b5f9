"""Vision-language models on two real ranks: FSDP2 with dummy images and ours, balanced in three ways.

    python -m bench.suites.images bench/results/images.json [--rounds 23]

The mixture is bench/data/images.json, fixed before anything was measured; it says how it was drawn. Each way with packs
at its best pack size of a few, found on the first minibatches; then all in turn, minibatch by minibatch, with the
optimizer step. Before that all compute the same gradient, or it raises. Bounds are FLOPs: FSDP2's ranks wait for each
other in each microbatch, in the tower and in the text's layers; ours once, for the fuller rank. FSDP2 also sends
parameters in each microbatch: how much slower that is where no rank waits is measured on balanced work, the same
samples on all ranks.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from odc_triton.balance import CostModel
from odc_triton.jobs.reports.report import table
from odc_triton.plan.fields import IGNORED
from odc_triton.plan.tower import TowerCost

from .. import quiet
from ..demo import RANKS, WARM_UP
from ..harness import Measured, Work, assign_packs, disturbed, median_ratio, single_thread_environment
from ..provenance import ROOT, options_of, save_measured, save_parts
from ..variants import Fsdp2, Fsdp2NoReshard, Odc, Variant
from .prefixes import Arm, memory, run

FILE = ROOT / "bench" / "data" / "images.json"
MINIBATCHES, SAMPLES = 24, 16  # a minibatch's samples, of all ranks

# How packs are made of samples, after the name of a strategy.
BY_TEXT = ", by tokens alone"  # else the tower counts too
DUMMIES = ", dummies"  # a pack without images gets the smallest one
AT_ENDS = ", dummies at the ends"  # of a rank's packs only the first and last: it does not communicate in between
BEFORE = 8  # tokens of text that come before the images

PATCH_VALUES = 3 * 2 * 4**2
IMAGE, VIDEO, START, END = 1023, 1022, 1021, 1020
# As in Qwen2.5-VL 3B the tower is about half of the cost of an image's token, and the embedding 6% of all weights.
_TOWER = {"depth": 4, "hidden_size": 128, "intermediate_size": 344, "num_heads": 4, "out_hidden_size": 256}
_TOWER |= {"patch_size": 4, "window_size": 32, "fullatt_block_indexes": [3]}
_TEXT: dict[str, Any] = {"vocab_size": 1024, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4}
_TEXT |= {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": None}
_TEXT |= {"rope_parameters": {"rope_type": "default", "mrope_section": [8, 12, 12], "rope_theta": 10000.0}}
_TOKENS = {"image_token_id": IMAGE, "video_token_id": VIDEO}
_TOKENS |= {"vision_start_token_id": START, "vision_end_token_id": END}
CONFIG = {"text_config": _TEXT, "vision_config": _TOWER, "tie_word_embeddings": True, **_TOKENS}

MOST_APART = 5e-6  # of gradients, in fp32
PACKS = (1, 2, 4)  # times the longest sample
SWEPT = 6  # minibatches, to find a way's best pack size, and of balanced work
COUNTED_RANKS = (8, 16)

Size = tuple[int, tuple[str, ...]]  # of a sample: tokens of text, and its images
DUMMY: Size = (1, ("2x2",))  # the smallest image, and no token that another predicts


def read(path: Path = FILE) -> list[list[Size]]:
    found = json.loads(path.read_text(encoding="utf-8"))["minibatches"]
    return [[(text, tuple(images)) for text, images in minibatch] for minibatch in found]


@dataclass(frozen=True)
class Mixture:
    """Random samples of `sizes`: `BEFORE` tokens, the images, the other tokens. All text is learned."""

    sizes: Sequence[Size]

    @cached_property
    def lengths(self) -> list[int]:
        return [text + sum(2 + h * w // 4 for h, w in map(_sides, own)) for text, own in self.sizes]

    def values(self, index: int) -> list[int]:
        """As `values_of` its sample, without making it."""
        return [h * w * PATCH_VALUES for h, w in map(_sides, self.sizes[index][1])]

    def __getitem__(self, index: int) -> dict[str, Any]:
        (text, own), generator = self.sizes[index], torch.Generator().manual_seed(index)
        ids = torch.randint(END, (text,), generator=generator).tolist()
        if not own:
            return {"input_ids": ids, "labels": ids}
        sides, head, tail = [*map(_sides, own)], ids[:BEFORE], ids[BEFORE:]
        inserted = [i for h, w in sides for i in (START, *[IMAGE] * (h * w // 4), END)]
        return {
            "input_ids": head + inserted + tail,
            "labels": head + [IGNORED] * len(inserted) + tail,
            "mm_token_type_ids": [0] * len(head) + [int(i == IMAGE) for i in inserted] + [0] * len(tail),
            "image_grid_thw": torch.tensor([(1, *each) for each in sides]),
            "pixel_values": torch.randn(sum(h * w for h, w in sides), PATCH_VALUES, generator=generator),
        }


def _sides(image: str) -> tuple[int, ...]:
    return tuple(map(int, image.split("x")))


@dataclass(frozen=True, kw_only=True)
class ImageWork(Work):
    """The mixture, by a Qwen2.5-VL model of `config`. `even`: all ranks train the samples of one."""

    even: bool = False

    def data(self) -> Mixture:
        return Mixture([sample for minibatch in read(Path(self.dataset)) for sample in minibatch] + [DUMMY])

    def whole_config(self) -> Any:
        from transformers import Qwen2_5_VLConfig

        return Qwen2_5_VLConfig(**self.config)

    def build(self) -> nn.Module:
        from transformers import Qwen2_5_VLForConditionalGeneration

        torch.manual_seed(self.seed)
        return Qwen2_5_VLForConditionalGeneration(self.whole_config())

    def cost(self) -> CostModel:
        return CostModel.from_config(self.whole_config().text_config)

    def tower(self) -> TowerCost:
        return TowerCost.from_config(self.whole_config())

    def assign(self, lengths: list[int], samples: list[int], *, balance: str, **how: Any) -> list[list[list[int]]]:
        if self.even:
            own, how["ranks"] = len(samples) // (ranks := how["ranks"]), 1
            return replace(self, even=False).assign(lengths[:own], samples[:own], balance=balance, **how) * ranks
        strategy, comma, words = balance.partition(",")
        data, tower, way = self.data(), self.tower(), comma + words
        extra = None if way == BY_TEXT else [tower.sample(data.values(index)) for index in samples]
        assigned = super().assign(lengths, samples, balance=strategy, extra=extra, **how)
        for own in assigned:
            for pack in {DUMMIES: own, AT_ENDS: [own[0], own[-1]]}.get(way, ()):
                if not any(data.sizes[index][1] for index in pack):
                    pack.append(len(data.sizes) - 1)
        return assigned


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
