"""Of docs/scale.md the tables of eight runs with adapters over a 70 B base: GB of each GPU, and runs per hour."""

from __future__ import annotations

from .results import markdown, read

TOKENS = (8192, 16384, 32768, 65536)


def data() -> dict:
    return read("large_models.json")["one_base"]


def table(data: dict) -> str:
    memory = []
    for row in data["memory"]:
        way = row["way"] + (", activations on the host" if row["offload"] else "")
        gigabytes = (f"{row['bytes'][str(tokens)] / 1e9:.0f}" for tokens in TOKENS)
        memory.append([row["base"], way, *gigabytes, f"{row['most']:,}"])
    columns = ("base", "runs", *(f"GB at {tokens:,}" for tokens in TOKENS), "most tokens")
    hourly = [
        [f"{row['cap']:,}", f"{row['samples']}", *(f"{row[way]:.3f}" for way in ("at_once", "odc", "split", "fsdp"))]
        for row in data["hourly"]
    ]
    ways = ("at once", "in turn, ODC", "in turn, ODC + split", "in turn, FSDP2")
    return (
        "Compute in bf16, adapters and states in fp32, AdamW, gradient checkpointing, a fused head. "
        "GB on each of 8 GPUs by tokens of a pack, and the most tokens that leave 10% of 80 GB free:\n\n"
        f"{markdown(columns, memory)}\n"
        "Runs of 1,000 steps per hour on 8 H100s, bf16 base, LongAlign-like lengths cut to the pack; a step has 8 "
        f"times the samples per GPU:\n\n{markdown(('pack', 'samples per GPU', *ways), hourly)}"
    )
