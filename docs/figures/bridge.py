"""The tables of docs/fsdp2_bridge.md: time and memory of `use_odc`, of FSDP2 and of the native engine."""

from __future__ import annotations

from .results import markdown, read

FSDP2, KEEPS, BRIDGE, OURS = (
    "FSDP2 + global packing",
    "FSDP2 no reshard + LB-Mini",
    "FSDP2 + use_odc + LB-Mini",
    "ODC + LB-Mini",
)
RATIOS = {
    f"{FSDP2} / {BRIDGE}": "FSDP2 with global packing / use_odc",
    f"{KEEPS} / {BRIDGE}": "FSDP2 without resharding, LB-Mini / use_odc",
    f"{BRIDGE} / {OURS}": "use_odc / the native engine",
}


def data() -> dict:
    return read("bridge.json")


def table(data: dict) -> str:
    rows = []
    for name, cell in data["time"].items():
        ratios = [cell["ratios"][key] for key in RATIOS]
        shown = [f"{it['ratio']:.2f} ({it['low']:.2f} to {it['high']:.2f})" for it in ratios]
        rows.append([name, f"{cell['tokens']:,.0f}", *shown])
    times = markdown(("samples", "tokens per minibatch", *RATIOS.values()), rows)
    memory = [
        [name, *(f"{peak[key] / 1e6:.0f}" for key in ("peak_private_bytes", "shared_bytes"))]
        for name, peak in data["memory"].items()
    ]
    memory = markdown(("at the peak of the demo", "private MB of each rank", "shared MB"), memory)
    return f"{times}\n{memory}\n95% intervals. {data['hardware']}; commit {data['commit'][:7]}.\n"
