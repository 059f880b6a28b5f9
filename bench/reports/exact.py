"""What exact sums cost: `python -m bench.reports.exact OUT.json [--minibatches N]`.

The demo's work, of few tokens, and that of bench.suites.split at 4 samples a rank, 2 ranks, ODC + LB-Mini with and
without exact sums, minibatch by minibatch in turn, with the optimizer step. Memory is the ranks' shared memory, as the
kernel counts it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from bench.demo import RANKS, WARM_UP, prepare
from bench.harness import (
    PeakMemory,
    Work,
    bootstrap_ratio,
    build,
    compare,
    disturbed,
    open_job,
    single_thread_environment,
    train_minibatch,
)
from bench.provenance import about, save_json
from bench.suites import split_cpu
from bench.variants import Odc, OdcExact, Variant
from odc_triton.base.report import table
from odc_triton.comm.launch import launch
from odc_triton.sharding.footprint import memory_plan


def shared_bytes(kind: type[Variant], work: Work) -> int:
    """Of one rank, after a minibatch: what it has touched of the ranks' shared memory. Collective."""
    open_job()
    train_minibatch(variant := build(kind, work), work, work.data(), work.cost(), 0, 0)
    _, shared = PeakMemory.read()
    dist.barrier()
    variant.events()
    dist.destroy_process_group()
    return shared


def timed(work: Work) -> dict:
    """Exact over plain, minibatch by minibatch; `tokens`: of a minibatch, on average."""
    results = launch(compare, (Odc, OdcExact), work, True, WARM_UP, ranks=RANKS)[0]
    plain, exact = (result.seconds[WARM_UP:] for result in results)
    lengths = work.data().lengths
    return {
        "exact_over_plain": bootstrap_ratio(exact, plain),
        "seconds": {result.name: result.seconds[WARM_UP:] for result in results},
        "minibatches": len(plain),
        "tokens": float(sum(lengths[m].sum() for m in work.minibatches[WARM_UP:])) / len(plain),
        "disturbed": disturbed(results, WARM_UP),
    }


def measure(folder: Path, minibatches: int) -> dict:
    demo = prepare(folder)
    demo = replace(demo, minibatches=demo.minibatches[: WARM_UP + minibatches])
    longer = split_cpu.work_of(folder, 4, max(minibatches // 4, 1))
    model = demo.build()
    return {
        "time": {"the demo": timed(demo), "4 samples per rank": timed(longer)},
        "shared_bytes": {k.name: sum(launch(shared_bytes, k, demo, ranks=RANKS)) for k in (Odc, OdcExact)},
        "planned_bytes": {k.name: memory_plan(model, RANKS, exact=k.exact).job_shared_bytes for k in (Odc, OdcExact)},
        "parameters": sum(p.numel() for p in model.parameters()),
        **about(),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minibatches", type=int, default=40)
    options = parser.parse_args(arguments)
    single_thread_environment()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), options.minibatches)
    save_json(options.out, found)
    rows = []
    for name, of in found["time"].items():
        ratio = of["exact_over_plain"]
        rows.append([name, f"{of['tokens']:,.0f}", f"{ratio['ratio']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})"])
    print(table(rows, ("", "tokens per minibatch", "exact over plain")))
    print(f"shared memory: {found['shared_bytes']} bytes, as planned {found['planned_bytes']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
