"""The table of docs/scale.md: efficiency from 8 to 1,024 GPUs. `python -m bench.reports.scaling`.

Everything is simulated except the balancing's own time, which is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from odc_triton.balance import assign_one
from odc_triton.base.report import table
from odc_triton.simulate.hardware import DEVICES
from odc_triton.simulate.job import SPLIT, queue_packs, simulate
from odc_triton.simulate.models import Model
from odc_triton.simulate.study import draw, make_job, named_lengths, usual_links

_DRAWN = 20_000
_NODE = 8


def _cpu_seconds(work: Callable[..., object], *given: object, **options: object) -> float:
    start_s = time.process_time()
    work(*given, **options)
    return time.process_time() - start_s


def main() -> None:
    """Prints: share of the time that GPUs compute, and the balancing's share of the step."""
    kind = DEVICES["h100"]
    rows = []
    for name in ("qwen2.5-1.5b", "qwen2.5-7b", "qwen2.5-32b"):
        model = Model.find(name)
        for gpus in (8, 64, 256, 1024):
            links = usual_links(kind, _NODE, nodes=gpus // _NODE)
            job, flat = (make_job(model, kind, links, hybrid=hybrid) for hybrid in (True, False))
            cells: list[str] = []
            for samples in (4, 16):
                minibatches = draw(
                    named_lengths("longalign", max(_DRAWN, gpus * samples)),
                    samples=gpus * samples,
                    minibatches=max(1, min(8, 512 // gpus)),
                )
                settings = [(job, "fsdp", "micro"), (job, "odc", "mini"), (job, "odc", SPLIT), (flat, "odc", "mini")]
                for each, schedule, balance in settings:
                    told = simulate(minibatches, job=each, schedule=schedule, balance=balance, token_cap=65_536)
                    if balance != SPLIT:  # it computes the same; what ranks wait in a wave is no compute
                        computed_s = (1 - told.idle_share) * told.step_s
                    cells.append(f"{computed_s / told.step_s:.0%}")
                    if balance == "mini" and each is job and samples == 16:
                        step_s, peak = told.step_s, told.peak_bytes or 0
            given = {"ranks": gpus, "token_cap": 65_536, "cost": model.cost}
            mini_s = _cpu_seconds(assign_one, minibatches[0], rank=0, balance="mini", **given)
            queue_s = _cpu_seconds(queue_packs, minibatches[0], **given)
            balancing = [
                f"{step_s:.1f}",
                f"{mini_s:.3f} ({mini_s / step_s:.2%})",
                f"{queue_s:.3f}",
                f"{peak / 1e9:.0f}",
            ]
            rows.append([name, gpus, *cells, *balancing])
    columns = ["model", "GPUs"]
    ways = ("FSDP2 + LB-Micro", "ODC + LB-Mini", "ODC + split", "ODC, one copy")
    columns += [f"{way}, {samples}/GPU" for samples in (4, 16) for way in ways]
    columns += ["step s, 16/GPU", "LB-Mini's dealing s (of step)", "queue's s", "GB/GPU"]
    print(table(rows, columns))


if __name__ == "__main__":
    main()
