"""The simulator compared with a measured run: `python -m bench.reports.simulated OUT.json [--minibatches N]`.

In one job, on the demo's model and data: every variant's single-sequence times (all ranks run the same sequence, once
or twice), and between them the demo's minibatches. The simulator predicts the latter from the former.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from odc_triton.balance.collate import count_target_tokens, pack_collate
from odc_triton.base.report import table
from odc_triton.comm.launch import launch
from odc_triton.data.dataset import TokenizedDataset
from odc_triton.data.records import IGNORED
from odc_triton.simulate.job import assign_packs
from odc_triton.simulate.run import simulate

from ..demo import RANKS, VARIANTS, prepare
from ..harness import (
    Work,
    build,
    in_turn,
    open_job,
    single_thread_environment,
    split_tokens,
    timed,
    train_minibatch,
)
from ..provenance import about, save_json
from .fitted import SequenceTime, from_measured

# Tokens of a sequence, and how often a minibatch has it: once to fit the cost of lengths, twice that of a microbatch.
POINTS = ((128, 1), (256, 1), (512, 1), (1024, 1), (2048, 1), (128, 2), (512, 2))
SCHEDULES = {"Fsdp2": "fsdp", "Fsdp2NoReshard": "fsdp-no-reshard"}  # of the others: odc


def measure(
    work: Work, points: Sequence[tuple[int, int]] = POINTS
) -> tuple[dict[str, list[dict]], dict[str, list[float]]]:
    """Per variant: its single-sequence times in every run, and the seconds of each minibatch of `work`. Collective.

    In every run a variant runs all `points` once and then the minibatch, so a slow spell of the machine affects both.
    """
    _, world = open_job()
    data, cost = TokenizedDataset.load(work.dataset), work.cost()
    learned = data.summary.target_tokens / data.summary.tokens  # no logits are computed for the others
    variants = [build(kind, work) for kind in VARIANTS]
    generator = torch.Generator().manual_seed(work.seed)
    singles: dict[str, list[dict]] = {
        v.name: [{"tokens": tokens, "microbatches": count, "seconds": []} for tokens, count in points] for v in variants
    }
    seconds: dict[str, list[float]] = {v.name: [] for v in variants}
    for run in range(len(work.minibatches) + 1):  # the first warms up
        for variant in in_turn(variants, run):
            for point in singles[variant.name] if run else singles[variant.name][:1]:
                document = torch.randint(4, work.config["vocab_size"], (point["tokens"],), generator=generator)
                labels = document.clone()
                labels[: round(point["tokens"] * (1 - learned))] = IGNORED
                packs = pack_collate([[{"input_ids": document, "labels": labels}]]) * point["microbatches"]
                took = timed(variant, packs, count_target_tokens(packs) * world, run).seconds
                if run:
                    point["seconds"].append(took)
            if run:
                seconds[variant.name].append(train_minibatch(variant, work, data, cost, run - 1, run).seconds)
    dist.destroy_process_group()
    return singles, seconds


def predict(work: Work, singles: dict[str, list[dict]]) -> dict[str, list[float]]:
    """Seconds of each minibatch of `work`, per variant, from single-sequence times alone.

    Costs are fitted to the medians over the runs. If single sequences took longer than these in a run, the machine was
    slow for its minibatch too, which is predicted to take longer by the same factor.
    """
    data = TokenizedDataset.load(work.dataset)
    minibatches = [[int(data.lengths[i]) for i in samples] for samples in work.minibatches]
    told = {}
    for kind in VARIANTS:
        points = singles[kind.name]
        medians = [statistics.median(point["seconds"]) for point in points]
        times = [SequenceTime(**point | {"seconds": typical}) for point, typical in zip(points, medians, strict=True)]
        job = from_measured(times, ranks=RANKS, layers=work.config["num_hidden_layers"], cost=work.cost())
        schedule = SCHEDULES.get(kind.__name__, "odc")
        how = {"token_cap": work.token_cap, "balance": kind.balance}
        options = {"ranks": RANKS, "cost": job.cost, "split_tokens": split_tokens(work, RANKS), **how}
        assigned = [assign_packs(minibatch, **options) for minibatch in minibatches]
        outcome = simulate(minibatches, job=job, schedule=schedule, assigned=assigned, **how)
        runs = range(len(work.minibatches))
        slowness = [sum(point["seconds"][run] for point in points) / sum(medians) for run in runs]
        told[kind.name] = [s * slow for s, slow in zip(outcome.seconds.tolist(), slowness, strict=True)]
    return told


def compare(folder: Path, *, minibatches: int) -> dict:
    """Everything measured and predicted, as plain data; writes data and tokenizer to `folder`."""
    work = prepare(folder)
    work = replace(work, minibatches=work.minibatches[:minibatches])
    singles, measured = launch(measure, work, ranks=RANKS)[0]
    predicted = predict(work, singles)
    return {
        "predicted_over_measured": {name: sum(predicted[name]) / sum(measured[name]) for name in measured},
        "measured_s": measured,
        "predicted_s": predicted,
        "single_sequences": singles,
        **about(),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if every prediction is within a tenth of what was measured, else 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minibatches", type=int, default=6)
    options = parser.parse_args(arguments)
    single_thread_environment()
    with tempfile.TemporaryDirectory() as folder:
        found = compare(Path(folder), minibatches=options.minibatches)
    save_json(options.out, found)
    rows = []
    for name, ratio in found["predicted_over_measured"].items():
        means = (statistics.mean(found[key][name]) for key in ("measured_s", "predicted_s"))
        rows.append([name, *(f"{mean:.2f}" for mean in means), f"{ratio:.3f}"])
    print(table(rows, ("", "measured s", "predicted s", "predicted / measured")))
    return 0 if all(0.9 < ratio < 1.1 for ratio in found["predicted_over_measured"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
