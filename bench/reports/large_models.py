"""Bytes per GPU for fine-tuning a large base: `python -m bench.reports.large_models` writes and prints a page's table.

Counted by `memory_plan` on the meta device, nothing is measured. A mixture's activations, which a plan does not know,
are those of a dense model whose MLPs are as wide as the experts that a token passes.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers

from bench.provenance import RESULTS, save_json
from odc_triton import memory_plan
from odc_triton.jobs.train.model import add_adapters, precision

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


def table(found: list[dict[str, Any]]) -> str:
    """As Markdown, with marks."""
    heads = ["base", "trained", *(f"GB on {n}" for n in GPUS), *(f"GPUs of {n} GB" for n in SIZES)]
    lines = ["| " + " | ".join(heads) + " |", "|---|---|" + "--:|" * (len(GPUS) + len(SIZES))]
    for at, row in enumerate(found):
        cells = [f"{row['bytes'][str(n)] / 1e9:.0f}<!--large_models.json:rows/{at}/bytes/{n} *1e-9-->" for n in GPUS]
        fits = ((n, row["gpus"][str(n)]) for n in SIZES)
        cells += [f"{gpus}<!--large_models.json:rows/{at}/gpus/{n}-->" if gpus else "–" for n, gpus in fits]
        lines.append("| " + " | ".join([row["model"], row["how"], *cells]) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    result = rows()
    save_json(RESULTS / "large_models.json", {"tokens": TOKENS, "rank": RANK, "left": LEFT, "rows": result})
    print(table(result))
