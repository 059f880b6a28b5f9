"""Bytes per GPU for fine-tuning a large base: `python -m bench.reports.large_models` writes large_models.json.

Counted by `memory_plan` on the meta device, and runs per hour by the simulator; nothing is measured. A mixture's
activations, which a plan does not know, are a dense model's with MLPs as wide as the experts that a token passes.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
import transformers

from bench.provenance import RESULTS, save_json
from odc_triton import memory_plan
from odc_triton.jobs.reports.report import table
from odc_triton.jobs.train.model import add_adapters, precision
from odc_triton.tools.simulate.hardware import DEVICES
from odc_triton.tools.simulate.models import Model
from odc_triton.tools.simulate.study import ALONE, make_job, named_lengths, rank_settings, usual_links

TOKENS, RANK = 4096, 16  # of a pack, of adapters
GPUS, SIZES = (1, 2, 4, 8), (24, 48, 80)  # GB of each
LEFT = 0.1  # of a GPU, for what a plan does not count
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
# As published: the class, `_SIZES`, the vocabulary, others; a mixture's are transformers' defaults.
MODELS: dict[str, tuple[str, tuple[int, ...], int, dict[str, int]]] = {
    "8B, as Llama 3.1": ("Llama", (4096, 14336, 32, 32, 8), 128256, {}),
    "32B, as Qwen2.5": ("Qwen2", (5120, 27648, 64, 40, 8), 152064, {}),
    "70B, as Llama 3.3": ("Llama", (8192, 28672, 80, 64, 8), 128256, {}),
    "35B-A3B, as Qwen3.5": ("Qwen3_5MoeText", (), 248320, {}),
}
TWINS = {"35B-A3B, as Qwen3.5": ("Qwen3_5Text", (2048, 9 * 512, 40, 16, 2), 248320, {"linear_num_value_heads": 32})}
HOW = {  # optimizer, quantize, whether adapters alone are trained
    "all, AdamW": ("adamw", None, False),
    "all, 8-bit AdamW": ("adamw-8bit", None, False),
    "LoRA": ("adamw", None, True),
    "LoRA on int8": ("adamw", "int8", True),
    "LoRA on nf4": ("adamw", "nf4", True),
}
# Eight runs on eight GPUs: a 70 B base, tokens of a pack, lengths cut to such packs, minibatches per run.
LARGE, CAPS, RUNS, MINIBATCHES = "70B, as Llama 3.3", (8192, 16384, 32768, 65536), 8, 32
SAMPLES = (1, 2, 4)  # per GPU


def build(kind: str, sizes: tuple[int, ...], vocabulary: int, others: dict[str, int], lora: bool = False) -> Any:
    given = dict(zip(_SIZES, sizes, strict=False)) | others
    config = getattr(transformers, f"{kind}Config")(vocab_size=vocabulary, tie_word_embeddings=False, **given)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return add_adapters(model, rank=RANK, alpha=None, targets="all-linear") if lora else model


def rows() -> list[dict[str, Any]]:
    found = []
    given = {"mp_policy": precision("bf16"), "backend": "cuda", "gradient_checkpointing": True}
    for name, sizes in MODELS.items():
        twin = memory_plan(build(*TWINS[name]), 1, **given).activation_bytes_per_token if name in TWINS else 0
        for how, (optimizer, quantize, lora) in HOW.items():
            if quantize == "int8" and name in TWINS:
                continue  # bitsandbytes has no experts in 8 bits
            model, options = build(*sizes, lora), {"optimizer": optimizer, "quantize": quantize}
            plans = [memory_plan(model, gpus, tokens_per_microbatch=TOKENS, **options, **given) for gpus in GPUS]
            total = {str(plan.world): plan.total_bytes + TOKENS * twin for plan in plans}
            fits = {
                str(size): next((gpus for gpus in GPUS if total[str(gpus)] <= (1 - LEFT) * size * 1e9), None)
                for size in SIZES
            }
            found.append({"model": name, "how": how, "bytes": total, "gpus": fits})
    return found


def one_base() -> dict[str, Any]:
    """Of eight runs over one base on 8 GPUs, and in turn on all: bytes on a GPU, and runs of 1,000 steps per hour."""
    model = build(*MODELS[LARGE], True)
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()
    given = {"mp_policy": precision("bf16"), "backend": "cuda", "gradient_checkpointing": True}
    logits = model.config.vocab_size * (2 + 4)  # of a token: a fused head makes none
    memory, hourly = [], []
    for base, way, offload in product(("bf16", "nf4"), ("in turn", "at once"), (False, True)):
        how = {"quantize": None if base == "bf16" else base, "run_ranks": 1 if way == "at once" else None}
        plan = memory_plan(model, RUNS, offload_checkpoints=offload, **how, **given)
        each = plan.activation_bytes_per_token - logits
        row = {"base": base, "way": way, "offload": offload, "without": plan.total_bytes}
        row["bytes"] = {str(cap): plan.total_bytes + cap * each for cap in CAPS}
        memory.append(row | {"most": int(((1 - LEFT) * 80e9 - plan.total_bytes) // each)})
    kind = DEVICES["h100"]
    job = make_job(Model.find("llama-3.3-70b").with_adapters(RANK), kind, usual_links(kind, RUNS))
    for cap in (*CAPS[:2], CAPS[-1]):
        lengths = [min(each, cap) for each in named_lengths("longalign", 10_000)]
        how = {"job": job, "token_cap": cap, "trials": RUNS * MINIBATCHES, "runs": RUNS, "split": True}
        found = [row for row in rank_settings(lengths, SAMPLES, **how) if "no reshard" not in row.name]  # too large
        for samples in SAMPLES:
            best: dict[str, float] = {}
            for row in found:
                way = {ALONE: "at_once", "ODC + LB-Split": "split"}.get(row.name, row.outcome.schedule)
                if row.samples == samples:
                    best[way] = max(best.get(way, 0.0), 3.6 / row.outcome.step_s)
            over = {f"over_{way}": best["at_once"] / best[way] for way in ("odc", "split", "fsdp")}
            hourly.append({"cap": cap, "samples": samples, **best, **over})
    plain = {row["way"]: row["without"] for row in memory if row["base"] == "bf16" and not row["offload"]}
    whole = sum(each.nbytes for each in model.parameters() if not each.requires_grad)
    extra = plain["at once"] - plain["in turn"]
    return {"whole": whole, "extra": extra, "memory": memory, "hourly": hourly}


if __name__ == "__main__":
    result, eight = rows(), one_base()
    given = {"tokens": TOKENS, "rank": RANK, "left": LEFT, "rows": result, "one_base": eight}
    save_json(RESULTS / "large_models.json", given)
    heads = ("base", "trained", *(f"GB on {n}" for n in GPUS), *(f"GPUs of {n} GB" for n in SIZES))
    shown = [
        [of["model"], of["how"], *(f"{n / 1e9:.0f}" for n in of["bytes"].values()), *of["gpus"].values()]
        for of in result
    ]
    print(table(shown, heads))
