"""The simulator's tables and figure in docs/: `python -m bench.reports.parametric study|scaling [--figure FILE.png]`.

`study`: speed-ups of ODC + LB-Mini over FSDP2 + LB-Micro, varying one setting at a time, as in arXiv 2601.19362.
`scaling`: efficiency from 8 to 1,024 GPUs. Everything is simulated except the balancing's own time, which is measured.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from odc_triton.balance import assign_one
from odc_triton.base.report import CURVES, FAINT, INK, table
from odc_triton.simulate.hardware import DEVICES
from odc_triton.simulate.job import SPLIT, queue_packs, simulate
from odc_triton.simulate.models import Model
from odc_triton.simulate.study import NAMED, SETTINGS, draw, make_job, named_lengths, usual_links

# The settings that are not varied.
MODEL, DATA, GPUS, SAMPLES = "qwen2.5-14b", "longalign", 8, 4
Panels = dict[str, tuple[Sequence[float], list[dict[str, float]]]]  # what was varied, and the speed-ups
_COMPARED = ("FSDP2 + LB-Micro", "FSDP2 + global packing", "ODC + LB-Micro", "ODC + LB-Mini")
_DRAWN = 20_000
_NODE = 8


def speedups(
    *,
    data: str = DATA,
    gpus: int = GPUS,
    samples: int = SAMPLES,
    shorter: float = 1.0,
    cap: float = 1.0,
    trials: int = 64,
) -> dict[str, float]:
    """Speed-ups over FSDP2 + LB-Micro, `split` that of ODC with split sequences; and `best`: ODC + LB-Mini over the
    better of the two FSDP2 settings.

    `shorter`: every length divided by it; `cap`: token cap over the longest sequence.
    """
    model, kind = Model.find(MODEL), DEVICES["a100"]
    nodes = max(1, gpus // _NODE)
    job = make_job(model, kind, usual_links(kind, min(gpus, _NODE), nodes=nodes))
    lengths = [max(1, round(n / shorter)) for n in named_lengths(data, _DRAWN)]
    minibatches = draw(lengths, samples=samples * gpus, minibatches=trials)
    steps = {}
    token_cap = round(cap * max(lengths))
    for name in (*_COMPARED, SPLIT):
        schedule, balance = SETTINGS.get(name, ("odc", SPLIT))
        steps[name] = simulate(minibatches, job=job, schedule=schedule, balance=balance, token_cap=token_cap).step_s
    base = steps[_COMPARED[0]]
    told = {name: base / step for name, step in steps.items()}
    told["best"] = min(steps[name] for name in _COMPARED[:2]) / steps["ODC + LB-Mini"]
    return told


def study() -> Panels:
    sizes, counts, caps, scales = (1, 2, 4, 8, 16), (2, 4, 8, 16, 32, 64), (1, 2, 4, 8), (16, 8, 4, 2, 1)
    panels: Panels = {
        f"samples per GPU, {data}": (sizes, [speedups(data=data, samples=n) for n in sizes]) for data in NAMED
    }
    longest = [NAMED[DATA].longest // n for n in scales]
    panels["longest sequence, tokens"] = longest, [speedups(shorter=n) for n in scales]
    panels["GPUs"] = counts, [speedups(gpus=n, trials=max(16, min(64, 1024 // n))) for n in counts]
    panels["token cap / longest sequence"] = caps, [speedups(cap=n) for n in caps]
    return panels


def print_study(panels: Panels) -> None:
    rows = []
    for name, (values, found) in panels.items():
        for value, each in zip(values, found, strict=True):
            of = ("ODC + LB-Mini", "ODC + LB-Micro", SPLIT, "best")
            rows.append([name, value, *(f"{each[k]:.2f}" for k in of)])
    columns = (
        "varied",
        "value",
        "ODC + LB-Mini",
        "ODC + LB-Micro",
        "ODC + split",
        "ODC + LB-Mini over the better FSDP2",
    )
    print(table(rows, columns))


def draw_study(panels: Panels, path: Path) -> None:
    """Four panels, one for each setting varied; data sets are curves of the first."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.1), dpi=110, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 4, sharey=True)
    groups: dict[str, list[tuple[str, str]]] = {}
    for name in panels:
        head, _, data = name.partition(", ") if name.startswith("samples") else (name, "", "")
        groups.setdefault(head, []).append((data, name))
    for axis, (head, members) in zip(axes, groups.items(), strict=True):
        for index, (data, name) in enumerate(members):
            values, found = panels[name]
            gains = [each["ODC + LB-Mini"] for each in found]
            axis.plot(values, gains, marker="o", ms=4, color=CURVES[index], label=data or "over LB-Micro")
            if not data:
                best = [each["best"] for each in found]
                axis.plot(values, best, marker="o", ms=4, ls="--", color=CURVES[3], label="over the better FSDP2")
        axis.set_xscale("log", base=2)
        axis.set_xticks(values, [f"{v // 1024}K" if v >= 1024 else f"{v:g}" for v in values])
        axis.minorticks_off()
        axis.axhline(1, color=FAINT, lw=0.8)
        axis.set_xlabel(head.removesuffix(", tokens"), color=FAINT, fontsize=9)
        axis.tick_params(labelsize=8, colors=FAINT)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=7.5, labelcolor=INK)
    axes[0].set_ylabel("speed-up of ODC + LB-Mini", color=FAINT, fontsize=9)
    figure.savefig(path)


def _cpu_seconds(work: Callable[..., object], *given: object, **options: object) -> float:
    start_s = time.process_time()
    work(*given, **options)
    return time.process_time() - start_s


def scaling() -> None:
    """Table: share of the time that GPUs compute, and the balancing's share of the step."""
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


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("study", "scaling"))
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args(arguments)
    if options.what == "scaling":
        scaling()
        return
    panels = study()
    print_study(panels)
    if options.figure:
        draw_study(panels, options.figure)


if __name__ == "__main__":
    main()
