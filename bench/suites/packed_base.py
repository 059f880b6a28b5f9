"""A base of 0.5 B packed while it loads, against `memory_plan`: python -m bench.suites.packed_base [--out FILE]

Two ranks load a random base of Qwen2.5-0.5B's shape as `train sft --lora-rank 8` does, plain and with `--quantize`.
Peak bytes of all ranks while it loads: their own, above what the process had with all libraries, and what they share.
Exits with status 1 if it is more than 3% above the plan's model, optimizer states left out.
"""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from odc_triton.jobs.launcher.launch import launch
from odc_triton.jobs.reports.report import table

from ..harness import PeakMemory, gather, open_job, set_torch_up
from ..provenance import about, options_of, save_parts

RANKS, MOST = 2, 1.03
SHAPE = {"vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24}
SHAPE |= {"num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True}
KINDS = (None, "nf4", "int8")


def write_base(folder: Path) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    model = Qwen2ForCausalLM._from_config(Qwen2Config(**SHAPE), dtype=torch.bfloat16)
    model.save_pretrained(folder)


def loaded(folder: Path, quantize: str | None) -> dict[str, Any]:
    """Bytes at the peak of loading and after it, of all ranks; and the plan's. Collective."""
    import bitsandbytes  # noqa: F401  # before what is measured

    from odc_triton import fully_shard, memory_plan
    from odc_triton.checkpoint import load_pretrained_shards, meta_causal_lm
    from odc_triton.checkpoint.pretrained import expect_weights
    from odc_triton.jobs.train.model import add_adapters, precision, quantise

    open_job()
    set_torch_up()
    model = add_adapters(meta_causal_lm(model=str(folder)), rank=8, alpha=None, targets="all-linear")
    planned = memory_plan(model, RANKS, mp_policy=precision("bf16"), quantize=quantize, optimizer="none", backend="cpu")
    model = meta_causal_lm(model=str(folder))
    if quantize is not None:
        quantise(model, quantize, "bf16")
    model = add_adapters(model, rank=8, alpha=None, targets="all-linear")
    expect_weights(model)
    watch = PeakMemory(every_s=0.005)
    before, _ = watch.read()
    with watch:
        model = fully_shard(model, mp_policy=precision("bf16"))
        load_pretrained_shards(model, folder)
    dist.barrier()
    after = gather((watch.private_bytes - before, watch.read()[0] - before, watch.read()[1]))
    dist.destroy_process_group()
    peak, stays, shared = (sum(each) for each in zip(*after, strict=True))
    # The plan's step; while it loads there is no gradient and nothing is dequantised.
    own = planned.master_shard_bytes + planned.buffer_bytes
    plan = RANKS * (own + planned.compute_shard_bytes + planned.gradient_shard_bytes)
    return {
        "peak": peak + shared,
        "after": stays + shared,
        "shared": shared,
        "plan": plan,
        "whole_plan": asdict(planned),
    }


def main() -> int:
    given = options_of(__doc__)
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as scratch:
        write_base(Path(scratch))
        found = {str(kind): launch(loaded, Path(scratch), kind, ranks=RANKS)[0] for kind in KINDS}
    rows = [
        [kind, *(f"{of[key] / 1e6:.0f}" for key in ("plan", "peak", "after", "shared"))] for kind, of in found.items()
    ]
    print(table(rows, ("--quantize", "plan, MB", "peak while it loads", "after", "of it shared")))
    if given.out is not None:
        save_parts(given.out, about=about(), ranks=RANKS, shape=SHAPE, found=found)
    return int(any(of["peak"] > MOST * of["plan"] for of in found.values()))


if __name__ == "__main__":
    sys.exit(main())
