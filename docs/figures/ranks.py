"""8 and 16 ranks with simulated compute: speed over a per-layer barrier with LB-Micro, and with ideal balance."""

from __future__ import annotations

from .chart import Axis, Row, chart
from .results import NAMES, markdown, read, shown

AXIS = Axis((1.0, 1.5, 2.0, 2.5, 3.0, 3.5), ("", "faster than a per-layer barrier"), left=150)
COLOURS = {
    "rank0": "ODC + LB-Mini; 1.0 = as fast as a per-layer barrier + LB-Micro",
    "rank1": "per-layer barrier + global packing",
    "step": "ideal balance: equal work on all ranks",
}
BASE = "layer barrier + LB-Micro"
WAYS = {"rank1": "layer barrier + global packing", "rank0": "ODC + LB-Mini"}


def data() -> dict:
    """The rows of the file by samples per rank, then by lengths and ranks, then by way."""
    cells: dict = {}
    for row in read("protocol_scale.json")["rows"]:
        cell = cells.setdefault(row["samples_per_rank"], {}).setdefault((row["lengths"], row["ranks"]), {})
        cell[row["way"]] = row
    return cells


def draw(data: dict) -> str:
    groups = {}
    for samples, cells in data.items():
        ordered = sorted(cells.items(), key=lambda item: (item[0][1], -item[1]["ODC + LB-Mini"]["speedup"]))
        groups[f"{samples} sample{'s' * (samples > 1)} per rank"] = [
            Row(
                f"{NAMES[lengths]}, {ranks} ranks",
                {kind: [cell[way]["speedup"]] for kind, way in WAYS.items()},
                f"{cell['ODC + LB-Mini']['speedup']:.2f}",
                cell[BASE]["speedup_bound"],
            )
            for (lengths, ranks), cell in ordered
        ]
    return chart("Speed of ODC and of global packing over a per-layer barrier, with the ideal", AXIS, groups, COLOURS)


def table(data: dict) -> str:
    rows = []
    for samples, cells in data.items():
        for (lengths, ranks), cell in cells.items():
            both = [f"{it['speedup']:.2f} / {it['speedup_simulated']:.2f}" for way, it in cell.items() if way != BASE]
            off = max((it["simulation_off"] for it in cell.values()), key=abs)
            over = cell["ODC + LB-Mini"]["over_own_bound"]
            ends = (f"{cell[BASE]['speedup_bound']:.2f}", f"{over:+.1%}", f"{off:+.1%}")
            rows.append([NAMES[lengths], f"{ranks}", f"{samples}", *both, *ends])
    ways = [shown(way) for way in cell if way != BASE]
    columns = ("lengths", "ranks", "samples per rank", *ways, "ideal", "LB-Mini over its fullest rank", "largest error")
    return markdown(columns, rows)
