"""What exact sums cost: `python -m bench.reports.exact OUT.json [--minibatches N]`.

The demo's model, lengths and text, 2 ranks, ODC + LB-Mini with and without exact sums, minibatch by minibatch in turn:
time of the whole minibatch with its optimizer step, and of what adds gradients alone. Memory is the ranks' shared
memory, as the kernel counts it.
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


def measure(folder: Path, minibatches: int) -> dict:
    work = prepare(folder)
    work = replace(work, minibatches=work.minibatches[: WARM_UP + minibatches])
    results = launch(compare, (Odc, OdcExact), work, True, WARM_UP, ranks=RANKS)[0]
    plain, exact = (result.seconds[WARM_UP:] for result in results)
    model = work.build()
    return {
        "exact_over_plain": bootstrap_ratio(exact, plain),
        "seconds": {result.name: result.seconds[WARM_UP:] for result in results},
        "minibatches": len(plain),
        "disturbed": disturbed(results, WARM_UP),
        "shared_bytes": {k.name: sum(launch(shared_bytes, k, work, ranks=RANKS)) for k in (Odc, OdcExact)},
        "planned_bytes": {k.name: memory_plan(model, RANKS, exact=k.exact).job_shared_bytes for k in (Odc, OdcExact)},
        "parameters": sum(p.numel() for p in model.parameters()),
        **about(),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minibatches", type=int, default=24)
    options = parser.parse_args(arguments)
    single_thread_environment()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), options.minibatches)
    save_json(options.out, found)
    ratio = found["exact_over_plain"]
    rows = [
        [name, f"{sum(found['seconds'][name]) / found['minibatches']:.3f}", f"{found['shared_bytes'][name] / 1e6:.0f}"]
        for name in found["seconds"]
    ]
    print(table(rows, ("", "s per minibatch", "MB shared")))
    print(f"exact over plain: {ratio['ratio']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f}); {found['disturbed']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
