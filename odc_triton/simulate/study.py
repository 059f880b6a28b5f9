"""All settings over the same minibatches, ranked; and the words and table that `odc-triton simulate` prints."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .dealing import QUEUE, deal
from .devices import GpuKind
from .job import Job, simulate
from .lengths import draw
from .links import Links
from .models import Model
from .outcome import Outcome

SETTINGS = {
    "FSDP2 + LocalSort": ("fsdp", "local"),
    "FSDP2 + LB-Micro": ("fsdp", "micro"),
    "FSDP2 + global packing": ("fsdp", "global"),
    "FSDP2 no reshard + LB-Mini": ("fsdp-no-reshard", "mini"),
    "ODC + LB-Micro": ("odc", "micro"),
    "ODC + LB-Mini": ("odc", "mini"),
    "ODC + queue": ("odc", "queue"),
}
BASELINE = "FSDP2 + LB-Micro"  # the paper's
COLUMNS = ("samples/GPU", "rank", "setting", "s/step", "speed-up", "idle", "exposed comm.", "GB/GPU", "")
DRAWN = (BASELINE, "FSDP2 + global packing", "ODC + LB-Mini", "ODC + queue")  # in pictures
_RECOMPUTED = 4 / 3  # of forward and backward: the forward once more
_COLLECTIVE_SMS = 0.1  # of an A100's or H100's SMs: a dozen of NCCL's blocks, each on an SM


@dataclass(frozen=True, kw_only=True)
class Row:
    """One setting at one minibatch size (`samples` per GPU). `speedup`: over the baseline, at the same size."""

    samples: int
    name: str
    outcome: Outcome
    speedup: float
    fits: bool


def make_job(
    model: Model,
    kind: GpuKind,
    links: Links,
    *,
    efficiency: float = 0.5,
    checkpointing: bool = True,
    fused_head: bool = True,
    hybrid: bool = True,
    slow: Mapping[int, float] | None = None,
    jitter: float = 0.0,
) -> Job:
    """A job whose compute times are the model's FLOPs over `efficiency` of the GPU's peak."""
    seconds_per_flop = (_RECOMPUTED if checkpointing else 1.0) / (kind.tflops * 1e12 * efficiency)
    return Job(
        links=links,
        seconds=lambda lengths: model.cost.pack(lengths) * seconds_per_flop,
        cost=model.cost,
        layers=model.layers,
        model=model,
        hybrid=hybrid,
        checkpointing=checkpointing,
        fused_head=fused_head,
        forward_share=1 / 4 if checkpointing else 1 / 3,
        meeting_s=1e-3,
        memory_gbs=kind.memory_gbs,
        slow=slow or {},
        jitter=jitter,
    )


def usual_links(kind: GpuKind, gpus: int, *, nodes: int = 1, efficiency: float = 0.8, nic_gbs: float = 0.0) -> Links:
    """A node of `gpus` of a kind behind a switch, `nodes` of them. `nic_gbs` 0: the usual for the kind."""
    return Links.switched(
        gpus,
        kind.link_gbs * efficiency,
        nodes=nodes,
        nic_gbs=(nic_gbs or kind.nic_gbs) * efficiency,
        sm_share=_COLLECTIVE_SMS,
    )


def rank_settings(
    lengths: Sequence[int],
    sizes: Sequence[int],
    *,
    job: Job,
    token_cap: int,
    memory_gb: float = math.inf,
    trials: int = 16,
    seed: int = 0,
    timeline_of: int | None = None,
) -> list[Row]:
    """All `SETTINGS` at each minibatch size of `sizes`, in samples per rank: fastest first of those that fit.

    Every setting has the same `trials` minibatches, drawn from `lengths`. `memory_gb`: of one GPU. `timeline_of`: the
    size at which outcomes keep their events. Raises ValueError as `draw` and `assign`.
    """
    rows: list[Row] = []
    for samples in sizes:
        minibatches = draw(lengths, samples=samples * job.ranks, minibatches=trials, seed=seed)
        dealt = {
            balance: [
                deal(m, ranks=job.ranks, token_cap=token_cap, balance=balance, cost=job.cost) for m in minibatches
            ]
            for balance in dict.fromkeys(balance for _, balance in SETTINGS.values() if balance != QUEUE)
        }
        outcomes = {
            name: simulate(
                minibatches,
                job=job,
                schedule=schedule,
                balance=balance,
                token_cap=token_cap,
                seed=seed,
                timeline=samples == timeline_of,
                dealt=dealt.get(balance),
            )
            for name, (schedule, balance) in SETTINGS.items()
        }
        base_s = outcomes[BASELINE].step_s
        found = [
            Row(
                samples=samples,
                name=name,
                outcome=outcome,
                speedup=base_s / outcome.step_s,
                fits=outcome.peak_bytes is None or outcome.peak_bytes <= memory_gb * 1e9,
            )
            for name, outcome in outcomes.items()
        ]
        rows += sorted(found, key=lambda row: (not row.fits, row.outcome.step_s))
    return rows


def cells(rows: Sequence[Row]) -> list[list[object]]:
    """The rows for `report.table` under `COLUMNS`."""
    place: dict[int, int] = {}
    table = []
    for row in rows:
        place[row.samples] = place.get(row.samples, 0) + 1
        peak = row.outcome.peak_bytes
        table.append(
            [
                row.samples,
                place[row.samples],
                row.name,
                f"{row.outcome.step_s:.3g}",
                f"{row.speedup:.2f}x",
                f"{row.outcome.idle_share:.0%}",
                f"{row.outcome.exposed_share:.1%}",
                None if peak is None else f"{peak / 1e9:.0f}",
                "" if row.fits else "does not fit",
            ]
        )
    return table


def verdict(rows: Sequence[Row]) -> str:
    """Per minibatch size: the fastest ODC setting against the fastest of FSDP2 that fits."""
    lines = []
    for samples in dict.fromkeys(row.samples for row in rows):
        fitting = [row for row in rows if row.samples == samples and row.fits]
        odc = next((row for row in fitting if row.outcome.schedule == "odc"), None)
        fsdp = next((row for row in fitting if row.outcome.schedule != "odc"), None)
        head = f"{samples} samples per GPU: "
        if odc is None:
            lines.append(head + "ODC does not fit; lower --token-cap, or take more GPUs")
        elif fsdp is None:
            lines.append(head + f"{odc.name} fits, no FSDP2 setting does")
        else:
            ratio = fsdp.outcome.step_s / odc.outcome.step_s
            word = f"{ratio:.2f}x as fast as" if abs(ratio - 1) >= 0.02 else "as fast as"
            lines.append(head + f"{odc.name} is {word} the fastest FSDP2 that fits, {fsdp.name}")
    return "\n".join(lines)
