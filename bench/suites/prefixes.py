"""Shared prefixes on two real ranks, compared with unshared samples and with each tree on one rank.

    python -m bench.suites.prefixes OUT.json [--rows 0 1 2 3 4] [--share 1.0]

Samples are groups of 8 completions, and conversations. Each way at its best pack size of a few, found by one minibatch
each; then all in turn, minibatch by minibatch, with the optimizer step. Before that all compute the same gradient, or
it raises. Bounds are FLOPs: of a baseline's fuller rank over ours. Everything was fixed before anything was measured.
`--share`: of the rounds, less for a trial.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from odc_triton.jobs.launcher.launch import launch
from odc_triton.jobs.reports.report import table

from .. import quiet
from ..cut import cut
from ..demo import RANKS, WARM_UP
from ..harness import (
    Measured,
    Work,
    assign_packs,
    compare,
    disturbed,
    median_ratio,
    peak_memory,
    single_thread_environment,
)
from ..provenance import about, options_of, save_parts
from ..reports.versus import LONG_CONFIG
from ..variants import Ddp, Fsdp2, Fsdp2NoReshard, Fsdp2Trees, Odc, OdcRepeated, OdcShared, OdcTrees, Variant

GROUP = 8  # completions
TURNS = 6
USER, THOUGHT, ANSWER = 64, 128, 64  # tokens of a turn
DENSE = (Fsdp2, Fsdp2NoReshard, Ddp, Odc)
TREES = (Fsdp2Trees, OdcTrees, OdcRepeated, OdcShared)
OVER = {"over_prefix_grouper": Fsdp2Trees, "over_tree_per_rank": OdcTrees, "over_repeated": OdcRepeated}
MOST_APART = 5e-6  # of gradients, in fp32

Arm = tuple[type[Variant], int]  # and its token cap


@dataclass(frozen=True, kw_only=True)
class Trees:
    """What a row trains: in each minibatch `trees`, groups of `GROUP` completions or conversations of `TURNS` turns.

    A turn is a sample: what was said before, without thoughts, then a thought and an answer, which are learned.
    """

    prompt: int
    completion: int
    trees: int
    rounds: int
    are_turns: bool = False

    @property
    def name(self) -> str:
        return f"{self.trees} x {TURNS} turns" if self.are_turns else f"{self.prompt} + {self.completion}"

    def starts(self) -> list[int]:
        """Of each sample of a tree, the first token that is learned."""
        if self.are_turns:
            return [self.prompt + turn * (ANSWER + USER) for turn in range(TURNS)]
        return [self.prompt] * GROUP

    def tokens(self) -> int:
        """Of a tree in one pack."""
        return max(self.starts()) + len(self.starts()) * (self.completion + 1)

    def work(self, folder: Path) -> Work:
        """Minibatches of random tokens; the first, which warms up, has two samples."""
        numbers, texts, learned, at = np.random.default_rng(self.prompt), [], [], 0
        for _ in range((WARM_UP + self.rounds) * self.trees):
            shared = numbers.integers(0, LONG_CONFIG["vocab_size"], max(self.starts()))
            for start in self.starts():
                texts.append(
                    np.concatenate([shared[:start], numbers.integers(0, LONG_CONFIG["vocab_size"], self.completion)])
                )
                learned.append((at + start, at + start + self.completion))
                at += start + self.completion
        path = folder / f"{self.prompt}_{self.completion}_{self.trees}_{self.rounds}.npz"
        cut(np.concatenate(texts), [*map(len, texts)], spans=np.array(learned)).save(path)
        drawn = np.arange(len(texts)).reshape(WARM_UP + self.rounds, -1).tolist()
        drawn[0] = drawn[0][:RANKS]
        return Work(dataset=str(path), config=LONG_CONFIG, minibatches=drawn, token_cap=self.tokens())


ROWS = (
    Trees(prompt=1024, completion=256, trees=1, rounds=7),
    Trees(prompt=1024, completion=256, trees=3, rounds=4),
    Trees(prompt=2048, completion=256, trees=1, rounds=5),
    Trees(prompt=64, completion=512, trees=1, rounds=12),
    Trees(prompt=256, completion=THOUGHT + ANSWER, trees=3, rounds=9, are_turns=True),
)


def run(arms: Sequence[Arm], work: Work, most_apart: float | None = None) -> list[Measured]:
    kinds, caps = zip(*arms, strict=True)
    return launch(compare, kinds, work, True, WARM_UP, caps, most_apart, ranks=RANKS)[0]


def fastest(arms: Sequence[Arm], work: Work) -> list[Arm]:
    """By their time of one minibatch."""
    once = replace(work, minibatches=work.minibatches[: WARM_UP + 1])
    took = {arm: measured.seconds[WARM_UP] for arm, measured in zip(arms, run(arms, once), strict=True)}
    return sorted(arms, key=took.get)


def flops(arm: Arm, work: Work) -> float:
    """Of the fuller rank, over all minibatches that count; heads compute learned tokens only."""
    (kind, cap), cost, data, total = arm, work.cost(), work.data(), 0.0
    head = 6 * work.config["hidden_size"] * work.config["vocab_size"]  # a token's part of `cost.linear`
    for samples in work.minibatches[WARM_UP:]:
        of_ranks = []
        for packs in assign_packs(replace(work, token_cap=cap), data, samples, kind.balance, cost, ranks=RANKS):
            of_ranks.append(0.0)
            for pack in packs:
                ends, positions = pack["cu_seq_lens_q"].tolist(), pack["position_ids"][0].tolist()
                segments = [cost.segment(positions[a], positions[b - 1] + 1) for a, b in pairwise(ends)]
                of_ranks[-1] += sum(segments) - head * (len(positions) - len(pack["target_positions"]))
        total += max(of_ranks)
    return total


def memory(arm: Arm, work: Work) -> int:
    """Peak bytes of a rank above the process without a model: its own, and an equal part of what ranks share."""
    kind, cap = arm
    once = replace(work, token_cap=cap, minibatches=work.minibatches[-1:])
    found = launch(peak_memory, kind, once, ranks=RANKS)[0]
    return found["peak_private_bytes"] + found["shared_bytes"] // RANKS


def row(of: Trees, folder: Path) -> dict[str, Any]:
    work = of.work(folder)
    # Of the pack sizes of dense samples one tree tells as much as three.
    one = replace(of, trees=of.trees if of.are_turns else 1, rounds=1).work(folder)
    longest = max(map(int, work.data().lengths))
    dense = fastest([(kind, longest * samples) for samples in (1, 2, 4) for kind in DENSE], one)[:2]
    arms = [*dense, *((kind, of.tokens()) for kind in TREES)]
    if of.trees > 1:
        swept = fastest([(kind, of.tokens() * trees) for trees in (1, 2) for kind in TREES], work)
        arms = [*dense, *(next(arm for arm in swept if arm[0] is kind) for kind in TREES)]
    results = run(arms, work, MOST_APART)
    seconds = {arm: each.seconds[WARM_UP:] for arm, each in zip(arms, results, strict=True)}
    best, ours = min(dense, key=lambda arm: statistics.median(seconds[arm])), arms[-1]
    over = {"over_dense": best, **{key: next(arm for arm in arms if arm[0] is kind) for key, kind in OVER.items()}}
    found = {
        "prompt": of.prompt,
        "completion": of.completion,
        "groups": of.trees,
        "turns": TURNS if of.are_turns else None,
        "bounds": {key: flops(arm, work) / flops(ours, work) for key, arm in over.items()},
        **{key: median_ratio(seconds[arm], seconds[ours]) for key, arm in over.items()},
        "arms": {key: f"{kind.name}, packs of {cap} tokens" for key, (kind, cap) in {**over, "ours": ours}.items()},
        "seconds": {f"{kind.name}, {cap}": took for (kind, cap), took in seconds.items()},
        "gradients_apart": max(each.apart for each in results),
        "memory_bytes": {
            "dense": memory(best, work),
            "dense_in_one_pack": memory((Odc, longest * GROUP), work),
            "tree_per_rank": memory(over["over_tree_per_rank"], work),
            "ours": memory(ours, work),
        },
        "disturbed": disturbed(results, WARM_UP),
    }
    return found | {"share_of_bound": found["over_dense"]["ratio"] / found["bounds"]["over_dense"]}


def words(of: dict[str, Any]) -> list[str]:
    """Of the table."""
    ratios = [
        f"{of[key]['ratio']:.2f} ({of[key]['low']:.2f} to {of[key]['high']:.2f}) of {of['bounds'][key]:.2f}"
        for key in ("over_dense", *OVER)
    ]
    peaks = [f"{of['memory_bytes'][key] / 1e6:.0f}" for key in ("dense", "dense_in_one_pack", "ours")]
    name = f"{of['prompt']} + {of['completion']}, {of['groups']}" + f" x {TURNS} turns" * (of["turns"] is not None)
    return [name, *ratios, " / ".join(peaks)]


def main() -> None:
    options = options_of(__doc__, out="out", rows=tuple(range(len(ROWS))), share=1.0)
    single_thread_environment()
    start_s, rows = time.monotonic(), []
    with tempfile.TemporaryDirectory() as folder:
        for of in (ROWS[number] for number in options.rows):
            rows.append(row(replace(of, rounds=max(1, round(of.rounds * options.share))), Path(folder)))
            print(f"{of.name}: {quiet.in_words(rows[-1]['disturbed'], of.rounds)}", flush=True)
    save_parts(options.out, cpu=rows, cpu_about={"took_s": time.monotonic() - start_s, **about()})
    print(table([words(each) for each in rows], ("prompt + completion, groups", "over dense", *OVER, "peak MB")))


if __name__ == "__main__":
    main()
