"""What can be chosen for a training run. Imports no torch, so that `--help` is quick."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class SftOptions:
    """Supervised fine-tuning."""

    data: str = field(metadata={"help": "JSON lines with `text`, or `prompt` and `completion` (learned: completion)"})
    out: str = field(metadata={"help": "folder for metrics.jsonl, trace.json and the model; must not hold another run"})
    model: str | None = _option(None, "a transformers causal LM: local folder or hub id")
    init: str | None = _option(None, "config.json of a model to start with random weights, instead of --model")
    tokenizer: str | None = _option(None, "folder, hub id or tokenizer.json; by default the model's")
    steps: int = _option(100, "optimizer steps")
    samples_per_rank: int = _option(16, "samples per rank and optimizer step, on average")
    token_cap: int = _option(4096, "most tokens in one pack, which is one microbatch")
    balance: Literal["mini", "micro", "global", "local"] = _option("mini", "how samples are dealt to the ranks")
    lr: float = _option(1e-5, "peak learning rate of AdamW")
    warmup_steps: int = _option(10, "steps of linear warm-up, before a cosine")
    lr_floor: float = _option(0.1, "fraction of the peak that the cosine ends at")
    weight_decay: float = _option(0.0, "AdamW's weight decay")
    clip_norm: float = _option(1.0, "largest norm of the gradient of all parameters")
    dtype: Literal["fp32", "bf16"] = _option("fp32", "dtype of compute; masters and sums of gradients are fp32")
    gradient_checkpointing: bool = _option(False, "recompute activations in backward: less memory, more time")
    replace_layers: bool = _option(False, "attention, embedding and linear layers read and add on their owners")
    fused_head: bool = _option(False, "never make the logits: less memory, a little more time")
    seed: int = _option(0, "of the samples' order, dropout and random weights")
    timeout_minutes: float = _option(30.0, "how late a live rank may be, in minutes; a dead one is named in seconds")

    def __post_init__(self) -> None:
        if (self.model is None) == (self.init is None):
            raise ValueError("give either --model (pretrained) or --init (random weights)")
        for name in ("steps", "samples_per_rank", "lr", "clip_norm", "timeout_minutes"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive and finite")
        if self.token_cap < 2:
            raise ValueError(f"token_cap is {self.token_cap}; a sample needs a token to predict and one before it: 2")
        if self.warmup_steps < 0 or self.weight_decay < 0:
            raise ValueError("warmup_steps and weight_decay must be at least 0")
        if not 0 <= self.lr_floor <= 1:
            raise ValueError(f"lr_floor is {self.lr_floor}; it must lie between 0 and 1")
