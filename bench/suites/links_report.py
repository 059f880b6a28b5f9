"""The tables of bench.suites.links, from its lines. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from odc_triton.jobs.reports.report import table


def size_of(size_bytes: int) -> str:
    """65536 as "64 KiB"."""
    for unit, factor in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes % factor == 0:
            return f"{size_bytes // factor} {unit}"
    return f"{size_bytes} B"


def cell_of(line: Mapping[str, Any]) -> str:
    """GB/s of the median call, and the share of what the rank's links carry, where that is known."""
    if not line["us"]:
        return "failed"
    gb_s = line["link_bytes"] / line["us"][len(line["us"]) // 2] / 1e3
    nominal = line["place"]["gb_s"]
    return f"{gb_s:.3g} GB/s" + (f", {gb_s / nominal:.0%}" if nominal else "")


def text_of(lines: Sequence[Mapping[str, Any]]) -> str:
    """One table for each place: operators down, sizes across; then what the run says about itself."""
    texts: list[str] = []
    by_place: dict[str, list[Mapping[str, Any]]] = {}
    for line in lines:
        if "place" in line:
            place = line["place"]
            rate = f", {place['gb_s']:.0f} GB/s" if place["gb_s"] else ""
            by_place.setdefault(f"## {', '.join(place['names'])}: {place['kind']}{rate}", []).append(line)
    for title, found in by_place.items():
        cells = {(line["operator"], line["size"]): cell_of(line) for line in found if "operator" in line}
        sizes = sorted({size for _, size in cells})
        rows = [
            [name, *(cells.get((name, size)) for size in sizes)] for name in dict.fromkeys(name for name, _ in cells)
        ]
        texts += [title, *([table(rows, ("each owner's", *map(size_of, sizes)))] if rows else [])]
        texts += [f"Not measured: {line['failure']}" for line in found if "failure" in line]
    for line in lines:
        texts += ["\n".join(f"- {key}: {value}" for key, value in line.get("about", {}).items())]
    return "\n\n".join(filter(None, texts)) + "\n"
