"""Ways to train, compared: `python -m bench.reports.versus STUDY OUT.json [--minibatches N]`.

    exact     exact sums over plain ones
    bridge    a model of torch's fully_shard under use_odc, FSDP2 and the native engine
    split     the longest samples in segments, LB-Mini, FSDP2 in two settings and DDP
    lengths   all baselines over ODC + LB-Mini, on three distributions of lengths: who gains and who does not

2 ranks, minibatch by minibatch in turn, with the optimizer step. Models, lengths and minibatches were fixed before
anything was measured. Memory is of one minibatch, as the kernel counts it.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from odc_triton.balance import assign
from odc_triton.jobs.launcher.launch import launch
from odc_triton.jobs.reports.report import table
from odc_triton.jobs.reports.trace import excerpt, idle_fraction
from odc_triton.tools.memory.footprint import memory_plan

from .. import quiet
from ..cut import cut, scaled_minibatches
from ..demo import CONFIG, LENGTHS, RANKS, TOKEN_CAP, WARM_UP, prepare
from ..harness import Work, bootstrap_ratio, compare, disturbed, peak_memory, single_thread_environment
from ..provenance import about, save_json
from ..variants import (
    Bridged,
    Ddp,
    Fsdp2,
    Fsdp2Micro,
    Fsdp2NoReshard,
    LayerBarrier,
    Odc,
    OdcExact,
    OdcMicro,
    OdcSplit,
    Variant,
)

Works = dict[str, Work]

# At 4,096 tokens attention is half of this model's work, as at 64K of a 7 B model's.
LONG_CONFIG = CONFIG | {"vocab_size": 4096, "num_hidden_layers": 4, "max_position_embeddings": 4096}
MINIBATCH_TOKENS = 8_000  # roughly, of all ranks, whatever the lengths


def random_text(lengths: Sequence[int], path: Path, seed: int, **work: object) -> Work:
    """Samples of random tokens: what is timed does not depend on them."""
    cut(np.random.default_rng(seed).integers(0, work["config"]["vocab_size"], sum(lengths)), lengths).save(path)
    return Work(dataset=str(path), **work)


def long_samples(folder: Path, samples: int, minibatches: int, config: dict = LONG_CONFIG) -> Work:
    """LongAlign-like lengths, scaled to the model's longest, `samples` per rank."""
    longest = config["max_position_embeddings"]
    lengths, drawn = scaled_minibatches(
        LENGTHS, longest=longest, samples=samples * RANKS, minibatches=WARM_UP + minibatches, seed=samples
    )
    path = folder / f"long_{longest}_{samples}.npz"
    return random_text(lengths, path, samples, config=config, minibatches=drawn, token_cap=longest)


def mixed(folder: Path, minibatches: int) -> Works:
    """The demo's, one sample a rank and few tokens; longer samples; many, where an assignment balances lengths."""
    demo = prepare(folder)
    few = max(minibatches // 4, 1)
    return {
        "the demo": replace(demo, minibatches=demo.minibatches[: WARM_UP + minibatches]),
        "4 samples per rank": long_samples(folder, 4, few),
        "8 samples per rank": long_samples(folder, 8, few, CONFIG),
    }


def few_samples(folder: Path, minibatches: int) -> Works:
    """The more samples, the longer a minibatch, the fewer of them."""
    counts = {1: minibatches, 2: max(minibatches // 3, 1), 4: max(minibatches // 5, 1)}
    return {f"{samples} per rank": long_samples(folder, samples, count) for samples, count in counts.items()}


DISTRIBUTIONS: dict[str, Callable[[random.Random], int]] = {
    # Short instructions and answers: log-normal, median 150 tokens.
    "chat-like": lambda numbers: min(max(int(numbers.lognormvariate(5.0, 0.7)), 8), 1024),
    # LongAlign's mean 16.5 K and maximum 64 K tokens, divided by 32.
    "LongAlign-like / 32": lambda numbers: min(max(int(numbers.lognormvariate(5.8, 1.0)), 16), TOKEN_CAP),
    "equal": lambda numbers: 512,
}


def distributions(folder: Path, minibatches: int) -> Works:
    """Whole minibatches of about `MINIBATCH_TOKENS` tokens."""
    works = {}
    for seed, (name, draw) in enumerate(DISTRIBUTIONS.items()):
        numbers, lengths, drawn = random.Random(seed), [], []
        for _ in range(WARM_UP + minibatches):
            first, tokens = len(lengths), 0
            while tokens < MINIBATCH_TOKENS or (len(lengths) - first) % RANKS:
                lengths.append(draw(numbers))
                tokens += lengths[-1]
            drawn.append(list(range(first, len(lengths))))
        how = {"config": CONFIG, "minibatches": drawn, "token_cap": TOKEN_CAP}
        works[name] = random_text(lengths, folder / f"drawn_{seed}.npz", seed, **how)
    return works


@dataclass(frozen=True, kw_only=True)
class Study:
    """`ratios`: whose time over whose. `works`: what they train, by name, of a folder for the data and the number of
    minibatches, by default `minibatches`. `memory`: whether to measure it too.
    """

    kinds: tuple[type[Variant], ...]
    ratios: tuple[tuple[type[Variant], type[Variant]], ...]
    works: Callable[[Path, int], Works] = mixed
    minibatches: int = 40
    memory: bool = True


def beside(one: type[Variant], *others: type[Variant]) -> dict[str, tuple]:
    """The kinds and ratios of a study of `one`, or of all others over it."""
    return {"kinds": (one, *others), "ratios": tuple((other, one) for other in others)}


STUDIES = {
    "exact": Study(**beside(Odc, OdcExact)),
    "bridge": Study(
        kinds=(Fsdp2, Fsdp2NoReshard, Bridged, Odc),
        ratios=((Fsdp2, Bridged), (Fsdp2NoReshard, Bridged), (Bridged, Odc)),
    ),
    "split": Study(
        **beside(OdcSplit, Odc, Fsdp2, Fsdp2NoReshard, Ddp), works=few_samples, minibatches=60, memory=False
    ),
    "lengths": Study(
        **beside(Odc, Fsdp2, Fsdp2Micro, Fsdp2NoReshard, Ddp, LayerBarrier, OdcMicro),
        works=distributions,
        minibatches=9,
        memory=False,
    ),
}


def bound(work: Work) -> float:
    """How much faster than LB-Mini the best balance would be by the cost model: the largest rank's cost over the even
    share, over all minibatches after those that warm up.
    """
    cost, data = work.cost(), work.data()
    largest, even = [], []
    for samples in work.minibatches[WARM_UP:]:
        lengths = [int(data.lengths[index]) for index in samples]
        assigned = assign(lengths, ranks=RANKS, token_cap=work.token_cap, balance=Odc.balance, cost=cost)
        of_ranks = [math.fsum(cost.sequence(lengths[i]) for pack in packs for i in pack) for packs in assigned]
        largest.append(max(of_ranks))
        even.append(sum(of_ranks) / RANKS)
    return math.fsum(largest) / math.fsum(even)


def timed(study: Study, work: Work) -> dict:
    """`tokens`: of a minibatch, on average. `idle`: None where waiting is not recorded."""
    results = launch(compare, study.kinds, work, True, WARM_UP, ranks=RANKS)[0]
    seconds = {result.name: result.seconds[WARM_UP:] for result in results}
    lengths, counted = work.data().lengths, work.minibatches[WARM_UP:]
    shown = range(WARM_UP, len(work.minibatches))
    idle = {
        kind.name: idle_fraction(excerpt({"": result.events}, minibatches=shown)[""]) if kind.records_waiting else None
        for kind, result in zip(study.kinds, results, strict=True)
    }
    return {
        "ratios": {f"{a.name} / {b.name}": bootstrap_ratio(seconds[a.name], seconds[b.name]) for a, b in study.ratios},
        "seconds": seconds,
        "idle": idle,
        "losses": {result.name: result.losses for result in results},
        "bound": bound(work),
        "minibatches": len(counted),
        "tokens": float(sum(lengths[samples].sum() for samples in counted)) / len(counted),
        "disturbed": disturbed(results, WARM_UP),
    }


def measured_memory(study: Study, work: Work) -> dict:
    model = work.build()
    return {
        "memory": {kind.name: launch(peak_memory, kind, work, ranks=RANKS)[0] for kind in study.kinds},
        "planned_bytes": {
            kind.name: memory_plan(model, RANKS, exact=kind.exact, backend="cpu").job_shared_bytes
            for kind in study.kinds
            if kind in (Odc, OdcExact)
        },
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def rows_of(name: str, of: dict) -> list[list[str]]:
    """Of the table: a row for each ratio."""
    rows = []
    for versus, ratio in of["ratios"].items():
        interval = f"{ratio['ratio']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})"
        first = versus.partition(" / ")[0]
        idle = "not recorded" if of["idle"][first] is None else f"{of['idle'][first]:.1%}"
        mean = f"{statistics.mean(of['seconds'][first]):.2f}"
        rows.append([name, f"{of['tokens']:,.0f}", f"{of['bound']:.2f}", versus, interval, mean, idle])
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minibatches", type=int, default=None, help="of the shortest; by default the study's")
    options = parser.parse_args(arguments)
    single_thread_environment()
    study = STUDIES[options.study]
    with tempfile.TemporaryDirectory() as folder:
        works = study.works(Path(folder), options.minibatches or study.minibatches)
        found = {"command": f"python -m bench.reports.versus {options.study}", **about()}
        found["time"] = {name: timed(study, work) for name, work in works.items()}
        if study.memory:
            found |= measured_memory(study, next(iter(works.values())))
    save_json(options.out, found)
    rows = [row for name, of in found["time"].items() for row in rows_of(name, of)]
    columns = ("", "tokens per minibatch", "bound", "time", "ratio", "s per minibatch", "idle")
    print(table(rows, columns))
    for name, of in found["time"].items():
        print(f"{name}: {quiet.in_words(of['disturbed'], of['minibatches'])}")
    columns = ("peak_private_bytes", "private_after_step_bytes", "shared_bytes")
    memory = [[name, *(f"{peak[key] / 1e6:.1f}" for key in columns)] for name, peak in found.get("memory", {}).items()]
    if memory:
        print(table(memory, ("MB", "peak private, a rank", "private after the step, a rank", "shared, the job")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
