"""`odc-triton simulate`: options in, a ranking out."""

from __future__ import annotations

import json
from pathlib import Path

from ..base.atomic import write_file
from ..base.report import save_timeline, table
from ..base.trace import save_trace
from ..machine.nvml_snapshot import SnapshotNvml
from ..machine.probe import read_topology
from ..machine.topology import Topology
from .devices import GpuKind, find_device
from .lengths import NAMED, lengths_of_file, named_lengths
from .links import Links
from .models import Model
from .options import SimulateOptions
from .study import COLUMNS, DRAWN, Row, cells, make_job, rank_settings, usual_links, verdict

_DRAWN = 10_000  # lengths of a named distribution


def main(options: SimulateOptions) -> int:
    """Prints the ranking, writes it to `options.out`; returns the exit status. Raises ValueError and OSError."""
    lengths, whence = _lengths(options)
    model = Model.find(options.model)
    kind, links, machine = _machine(options)
    cap = options.token_cap or max(lengths)
    over = sum(length > cap for length in lengths)
    if over:
        raise ValueError(
            f"{over} of {len(lengths)} sequences are longer than the token_cap of {cap} (the longest: {max(lengths)}): "
            "raise --token-cap, or truncate or drop them"
        )
    job = make_job(
        model,
        kind,
        links,
        efficiency=options.efficiency,
        checkpointing=options.checkpointing,
        fused_head=options.fused_head,
        hybrid=options.hybrid,
        slow={} if options.slow == 1 else {0: options.slow},
        jitter=options.jitter,
    )
    sizes = options.minibatches
    drawn = sizes[len(sizes) // 2]
    trials = options.trials or max(4, min(16, 512 // options.gpus))
    rows = rank_settings(
        lengths,
        sizes,
        job=job,
        token_cap=cap,
        memory_gb=kind.memory_gb,
        trials=trials,
        seed=options.seed,
        timeline_of=drawn if options.out else None,
    )
    longest, mean = max(lengths), sum(lengths) / len(lengths)
    head = (
        f"{whence}: mean {mean:,.0f}, longest {longest:,}, token cap {cap:,} tokens\n"
        f"{model.name} ({model.parameters / 1e9:.1f} B parameters) on {machine}\n"
        f"speed-up: over FSDP2 + LB-Micro at the same minibatch; mean of {trials} minibatches; simulated"
    )
    shown = table(cells(rows), COLUMNS)
    print(f"{head}\n\n{shown}\n\n{verdict(rows)}")
    if options.out:
        _write(Path(options.out), f"{head}\n\n{shown}\n\n{verdict(rows)}\n", rows, drawn)
    return 0


def _lengths(options: SimulateOptions) -> tuple[list[int], str]:
    if options.lengths in NAMED:
        named = NAMED[options.lengths]
        count = max(_DRAWN, options.gpus * max(options.minibatches))
        return named_lengths(options.lengths, count, seed=options.seed), f"like {options.lengths} ({named.source})"
    if not Path(options.lengths).exists():
        raise ValueError(f"lengths {options.lengths!r} is neither a file nor one of {', '.join(NAMED)}")
    return lengths_of_file(options.lengths)


def _machine(options: SimulateOptions) -> tuple[GpuKind, Links, str]:
    each = options.gpus // options.nodes
    nodes = f"{options.nodes} nodes of " if options.nodes > 1 else ""
    if options.topology is None:
        name = options.gpu or "a100"
        kind = find_device(name)
        links = usual_links(
            kind,
            each,
            nodes=options.nodes,
            efficiency=options.link_efficiency,
            nic_gbs=(options.nic_gbs or 0.0) / options.link_efficiency,
        )
        return kind, links, f"{nodes}{each} x {name.upper()}, {links.port_gbs[0]:.0f} GB/s each"
    topology = _snapshot(Path(options.topology))
    name = options.gpu or (topology.devices[0].name if topology.devices else "nothing")
    kind = find_device(name)
    links = Links.from_topology(
        topology,
        gpus=each,
        efficiency=options.link_efficiency,
        nodes=options.nodes,
        nic_gbs=options.nic_gbs or kind.nic_gbs * options.link_efficiency,
        sm_share=0.1,
    )
    return kind, links, f"{nodes}{each} x {name}, {topology.key}"


def _snapshot(path: Path) -> Topology:
    try:
        content = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no JSON ({error}): give a snapshot of the driver's answers") from None
    if not isinstance(content, dict) or "devices" not in content:
        raise ValueError(f"{path} has no `devices`: give a snapshot of the driver's answers")
    return read_topology(SnapshotNvml(content), (), ())


def _write(out: Path, text: str, rows: list[Row], drawn: int) -> None:
    out.mkdir(parents=True, exist_ok=True)
    write_file(out / "table.md", text.encode())
    plain = [
        {
            "samples_per_gpu": row.samples,
            "setting": row.name,
            "step_s": row.outcome.step_s,
            "speedup": row.speedup,
            "idle": row.outcome.idle.tolist(),
            "exposed_share": row.outcome.exposed_share,
            "peak_bytes": row.outcome.peak_bytes,
            "fits": row.fits,
        }
        for row in rows
    ]
    write_file(out / "simulate.json", json.dumps(plain, indent=1, allow_nan=False).encode())
    shown = {row.name: row.outcome.events for row in rows if row.samples == drawn}
    tracks = {name: shown[name] for name in DRAWN}
    save_trace(tracks, out / "trace.json")
    title = f"Simulated: one minibatch of {drawn} samples per GPU; red is waiting"
    save_timeline(tracks, out / "timeline.png", title=title)
    print(f"\nwritten to {out}: table.md, simulate.json, timeline.png, trace.json")
