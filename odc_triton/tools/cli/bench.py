"""Options of `odc-triton bench`. Imports no torch, so that `--help` is quick; bench/suites/lengths.py does the work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...jobs.options.options import (
    REQUIRED,
    option,
    plain_paths,
    require_at_least,
    require_files,
    require_one_model,
    require_seed,
    require_token_cap,
    require_writable,
)


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """FSDP2, DDP and ODC, side by side on given sequence lengths."""

    lengths: str = option(REQUIRED, "file of lengths in tokens, one per line; or JSON lines with `length` or texts")
    out: str = option("out/bench", "folder for lengths.json and lengths.md")
    model: str | None = option(None, "a transformers causal LM: local folder or hub id")
    init: str | None = option(None, "config.json of a model with random weights, instead of --model")
    tokenizer: str | None = option(None, "counts the tokens of texts: folder or hub id; by default the model's")
    token_cap: int | None = option(None, "most tokens in one pack; longer samples are cut; by default the longest")
    samples_per_rank: int = option(4, "samples per rank and minibatch")
    minibatches: int = option(4, "minibatches to time in each round, after one to warm up")
    rounds: int = option(3, "rounds; each runs every variant once")
    quick: bool = option(
        False, "one round of at most 2 minibatches; without --variants of FSDP2 (two settings) and ODC"
    )
    variants: str | None = option(None, "variants to run, by their names in the table and with commas; by default all")
    device: Literal["auto", "cpu", "cuda"] = option("auto", "auto: cuda if there is a GPU for every rank")
    dtype: Literal["fp32", "bf16"] | None = option(None, "dtype of compute; by default bf16 on GPUs, fp32 on the CPU")
    gradient_checkpointing: bool = option(False, "recompute activations in backward")
    seed: int = option(0, "seed for the random weights, tokens and the samples' order")

    def __post_init__(self) -> None:
        plain_paths(self, "lengths", "out", "model", "init", "tokenizer")
        require_one_model(self)
        require_at_least(self, 1, "samples_per_rank", "minibatches", "rounds")
        require_token_cap(self)
        require_seed(self)
        require_files(self, "init", "lengths")
        require_writable("--out", self.out)
