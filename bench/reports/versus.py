"""What one way to train costs over others: `python -m bench.reports.versus STUDY OUT.json [--minibatches N]`.

    exact     exact sums over plain ones
    bridge    a model of torch's fully_shard under use_odc, beside FSDP2 and our own engine

Three kinds of work: the demo's, one sample a rank and few tokens; that of bench.suites.split at 4 samples a rank; and
the demo's model with 8 samples a rank, where dealing evens out lengths. 2 ranks, minibatch by minibatch in turn, with
the optimizer step. Memory is of one minibatch, as the kernel counts it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from odc_triton.base.report import table
from odc_triton.comm.launch import launch
from odc_triton.sharding.footprint import memory_plan

from ..demo import CONFIG, RANKS, TOKEN_CAP, WARM_UP, prepare
from ..harness import (
    Work,
    bootstrap_ratio,
    compare,
    disturbed,
    peak_memory,
    single_thread_environment,
)
from ..provenance import about, save_json
from ..suites import split_cpu
from ..variants import Bridged, Fsdp2, Fsdp2NoReshard, Odc, OdcExact, Variant

MANY = 8  # samples per rank


@dataclass(frozen=True, kw_only=True)
class Study:
    """`ratios`: whose time over whose."""

    kinds: tuple[type[Variant], ...]
    ratios: tuple[tuple[type[Variant], type[Variant]], ...]


STUDIES = {
    "exact": Study(kinds=(Odc, OdcExact), ratios=((OdcExact, Odc),)),
    "bridge": Study(
        kinds=(Fsdp2, Fsdp2NoReshard, Bridged, Odc),
        ratios=((Fsdp2, Bridged), (Fsdp2NoReshard, Bridged), (Bridged, Odc)),
    ),
}


def timed(study: Study, work: Work) -> dict:
    """`tokens`: of a minibatch, on average."""
    results = launch(compare, study.kinds, work, True, WARM_UP, ranks=RANKS)[0]
    seconds = {result.name: result.seconds[WARM_UP:] for result in results}
    lengths, counted = work.data().lengths, work.minibatches[WARM_UP:]
    return {
        "ratios": {f"{a.name} / {b.name}": bootstrap_ratio(seconds[a.name], seconds[b.name]) for a, b in study.ratios},
        "seconds": seconds,
        "losses": {result.name: result.losses for result in results},
        "minibatches": len(counted),
        "tokens": float(sum(lengths[samples].sum() for samples in counted)) / len(counted),
        "disturbed": disturbed(results, WARM_UP),
    }


def measure(study: Study, folder: Path, minibatches: int) -> dict:
    """`minibatches`: of the demo's work; the others have fewer, as theirs are longer."""
    demo = prepare(folder)
    demo = replace(demo, minibatches=demo.minibatches[: WARM_UP + minibatches])
    few = max(minibatches // 4, 1)
    works = {
        "the demo": demo,
        "4 samples per rank": split_cpu.work_of(folder, 4, few),
        f"{MANY} samples per rank": split_cpu.work_of(folder, MANY, few, longest=TOKEN_CAP, config=CONFIG),
    }
    model = demo.build()
    return {
        "time": {name: timed(study, work) for name, work in works.items()},
        "memory": {kind.name: launch(peak_memory, kind, demo, ranks=RANKS)[0] for kind in study.kinds},
        "planned_bytes": {
            kind.name: memory_plan(model, RANKS, exact=kind.exact).job_shared_bytes
            for kind in study.kinds
            if kind in (Odc, OdcExact)
        },
        "parameters": sum(p.numel() for p in model.parameters()),
        **about(),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minibatches", type=int, default=40)
    options = parser.parse_args(arguments)
    single_thread_environment()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(STUDIES[options.study], Path(folder), options.minibatches)
    save_json(options.out, found)
    rows = []
    for name, of in found["time"].items():
        for versus, ratio in of["ratios"].items():
            interval = f"{ratio['ratio']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})"
            rows.append([name, f"{of['tokens']:,.0f}", versus, interval])
    print(table(rows, ("", "tokens per minibatch", "time", "ratio")))
    columns = ("peak_private_bytes", "private_after_step_bytes", "shared_bytes")
    memory = [[name, *(f"{peak[key] / 1e6:.1f}" for key in columns)] for name, peak in found["memory"].items()]
    print(table(memory, ("MB", "peak private, a rank", "private after the step, a rank", "shared, the job")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
