"""Bytes per GPU for Qwen2.5 under ODC and FSDP2: `python -m bench.reports.memory_table` prints docs/memory.md's tables.

Everything is computed by `odc_triton.tools.memory.footprint` on models built on the meta device; nothing is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import Qwen2Config, Qwen2ForCausalLM

from odc_triton.tools.memory.footprint import MemoryPlan, memory_plan
from odc_triton.tools.memory.peaks import activation_bytes_per_token

from ..stdlib_corpus import qwen2

WORLDS = (1, 2, 4, 8)
NODES = (2, 4, 8)  # of 8 GPUs each
# Qwen2.5 as published.
MODELS = {
    "1.5 B": qwen2(151936, 1536, 8960, 28, 12, 2, 131072, True),
    "7 B": qwen2(152064, 3584, 18944, 28, 28, 4, 131072, False),
    "14 B": qwen2(152064, 5120, 13824, 48, 40, 8, 131072, False),
    "32 B": qwen2(152064, 5120, 27648, 64, 40, 8, 131072, False),
}


def build(name: str) -> Qwen2ForCausalLM:
    """The model of `MODELS` on the meta device, fp32."""
    with torch.device("meta"):
        return Qwen2ForCausalLM(Qwen2Config(**MODELS[name], dtype=torch.float32))


def _plan(model: Qwen2ForCausalLM, world: int, **others: Any) -> MemoryPlan:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return memory_plan(model, world, mp_policy=policy, backend="cuda", **others)


def _odc_parts(plan: MemoryPlan) -> tuple[int, ...]:
    shards = (plan.compute_shard_bytes, plan.gradient_shard_bytes)
    return (*shards, plan.persistent_private_bytes, plan.transient_bytes, plan.total_bytes)


def numbers() -> dict[str, list[tuple]]:
    """Rows of a name, a number of GPUs and bytes: on one node, on several, and of activations per token."""
    found: dict[str, list[tuple]] = {"gpus": [], "nodes": [], "activations": []}
    for name in MODELS:
        model = build(name)
        for world in WORLDS:
            odc, fsdp2, whole = (_plan(model, world, scheme=scheme) for scheme in ("odc", "fsdp2", "fsdp2_no_reshard"))
            theirs = (fsdp2.persistent_private_bytes, fsdp2.transient_bytes, fsdp2.total_bytes, whole.total_bytes)
            found["gpus"].append((name, str(world), *_odc_parts(odc), *theirs))
        for nodes in NODES:
            found["nodes"].append((name, f"{nodes} x 8", *_odc_parts(_plan(model, 8, replicas=nodes))))
        kept = [
            activation_bytes_per_token(model, itemsize=itemsize, gradient_checkpointing=checkpointing)
            for itemsize in (2, 4)
            for checkpointing in (False, True)
        ]
        logits = [model.config.vocab_size * (itemsize + 4) for itemsize in (2, 4)]
        found["activations"].append((name, kept[0], kept[1], logits[0], kept[2], kept[3], logits[1]))
    return found


def _lines(rows: list[tuple], form: Callable[[float], str]) -> list[str]:
    return ["| " + " | ".join(cell if isinstance(cell, str) else form(cell) for cell in row) + " |" for row in rows]


def table(found: dict[str, list[tuple]]) -> str:
    """`numbers` as Markdown."""
    return "\n".join(
        [
            "GB per GPU without activations:",
            "",
            "| model | GPUs | ODC: bf16 shard | fp32 gradient shard | masters + states | transient | **ODC** "
            "| FSDP2: masters + states + gradients | transient | **FSDP2** | **FSDP2, no reshard** |",
            "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
            *_lines(found["gpus"], lambda cell: f"{cell / 1e9:.1f}"),
            "",
            "GB per GPU without activations, hybrid sharding over nodes of 8 GPUs:",
            "",
            "| model | GPUs | bf16 shard | fp32 gradient shard | masters + states | transient | **ODC** |",
            "|---|--:|--:|--:|--:|--:|--:|",
            *_lines(found["nodes"], lambda cell: f"{cell / 1e9:.1f}"),
            "",
            "MB of activations per token of a microbatch, the same for ODC and FSDP2 (estimate):",
            "",
            "| model | bf16 | bf16, checkpointed | of it logits | fp32 | fp32, checkpointed | of it logits |",
            "|---|--:|--:|--:|--:|--:|--:|",
            *_lines(found["activations"], lambda cell: f"{cell / 1e6:.2f}"),
            "",
        ]
    )


if __name__ == "__main__":
    print(table(numbers()), end="")
