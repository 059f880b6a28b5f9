"""The tables of docs/memory.md: bytes per GPU for Qwen2.5, ODC and FSDP2. `python -m bench.reports.memory_table`.

Prints the table, or with `--write FILE` puts it between the two marks in that file. Everything is computed by
`odc_triton.sharding.footprint` on models built on the meta device; nothing is measured.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import Qwen2Config, Qwen2ForCausalLM

from odc_triton.sharding.footprint import MemoryPlan, memory_plan
from odc_triton.sharding.peaks import activation_bytes_per_token

BEGIN = "<!-- begin: python -m bench.reports.memory_table -->"
END = "<!-- end: python -m bench.reports.memory_table -->"
WORLDS = (1, 2, 4, 8)
NODES = (2, 4, 8)  # of 8 GPUs each
# Qwen2.5 as published.
_SIZES = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("intermediate_size", "vocab_size", "tie_word_embeddings"),
)
MODELS = {
    "1.5 B": (1536, 28, 12, 2, 8960, 151936, True),
    "7 B": (3584, 28, 28, 4, 18944, 152064, False),
    "14 B": (5120, 48, 40, 8, 13824, 152064, False),
    "32 B": (5120, 64, 40, 8, 27648, 152064, False),
}


def build(name: str) -> Qwen2ForCausalLM:
    """The model of `MODELS` on the meta device, fp32."""
    sizes = dict(zip(_SIZES, MODELS[name], strict=True))
    with torch.device("meta"):
        return Qwen2ForCausalLM(Qwen2Config(**sizes, dtype=torch.float32))


def _plan(model: Qwen2ForCausalLM, world: int, **others: Any) -> MemoryPlan:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return memory_plan(model, world, mp_policy=policy, backend="cuda", **others)


def _odc_parts(plan: MemoryPlan) -> tuple[int, ...]:
    shards = (plan.compute_shard_bytes, plan.gradient_shard_bytes)
    return (*shards, plan.persistent_private_bytes, plan.transient_bytes, plan.total_bytes)


def _row(name: str, gpus: str, *parts: int) -> str:
    return f"| {name} | {gpus} | " + " | ".join(f"{part / 1e9:.1f}" for part in parts) + " |"


def rows(name: str) -> list[str]:
    """Lines of the two tables for one model: bytes per GPU for each world, then activations per token."""
    model = build(name)
    lines = []
    for world in WORLDS:
        odc, fsdp2, whole = (_plan(model, world, scheme=scheme) for scheme in ("odc", "fsdp2", "fsdp2_no_reshard"))
        theirs = (fsdp2.persistent_private_bytes, fsdp2.transient_bytes, fsdp2.total_bytes, whole.total_bytes)
        lines.append(_row(name, str(world), *_odc_parts(odc), *theirs))
    kept = [
        activation_bytes_per_token(model, itemsize=itemsize, gradient_checkpointing=checkpointing)
        for itemsize in (2, 4)
        for checkpointing in (False, True)
    ]
    logits = [model.config.vocab_size * (itemsize + 4) for itemsize in (2, 4)]
    cells = [kept[0], kept[1], logits[0], kept[2], kept[3], logits[1]]
    return [*lines, f"| {name} | " + " | ".join(f"{cell / 1e6:.2f}" for cell in cells) + " |"]


def rows_of_nodes(name: str) -> list[str]:
    """Lines of the table for hybrid sharding: a replica on each node of 8 GPUs."""
    model = build(name)
    return [_row(name, f"{nodes} x 8", *_odc_parts(_plan(model, 8, replicas=nodes))) for nodes in NODES]


def table() -> str:
    """All tables as Markdown, without a newline at the end."""
    per_model = [rows(name) for name in MODELS]
    return "\n".join(
        [
            "GB per GPU without activations:",
            "",
            "| model | GPUs | ODC: bf16 shard | fp32 gradient shard | masters + states | transient | **ODC** "
            "| FSDP2: masters + states + gradients | transient | **FSDP2** | **FSDP2, no reshard** |",
            "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
            *(line for lines in per_model for line in lines[:-1]),
            "",
            "GB per GPU without activations, hybrid sharding over nodes of 8 GPUs:",
            "",
            "| model | GPUs | bf16 shard | fp32 gradient shard | masters + states | transient | **ODC** |",
            "|---|--:|--:|--:|--:|--:|--:|",
            *(line for name in MODELS for line in rows_of_nodes(name)),
            "",
            "MB of activations per token of a microbatch, the same for ODC and FSDP2 (estimate):",
            "",
            "| model | bf16 | bf16, checkpointed | of it logits | fp32 | fp32, checkpointed | of it logits |",
            "|---|--:|--:|--:|--:|--:|--:|",
            *(lines[-1] for lines in per_model),
        ]
    )


def write(path: Path) -> None:
    """Puts the table between the marks of `path`; raises ValueError if it has none."""
    text = path.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        raise ValueError(f"{path} has no lines {BEGIN!r} and {END!r}; add them where the table belongs")
    head, rest = text.split(BEGIN)
    tail = rest.split(END)[1]
    path.write_text(f"{head}{BEGIN}\n\n{table()}\n\n{END}{tail}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the table between FILE's marks")
    path = parser.parse_args().write
    if path:
        write(path)
    else:
        print(table())


if __name__ == "__main__":
    main()
