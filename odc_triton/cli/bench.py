"""What `odc-triton bench` can be told. Imports no torch: `--help` is quick. bench/suites/lengths.py does the work."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..data.lengths import LEAST


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """All ways to train, side by side on given lengths of sequences."""

    lengths: str = field(metadata={"help": "file of lengths in tokens, one a line; or JSON lines, `length` or texts"})
    out: str = _option("out/bench", "folder for lengths.json and lengths.md")
    model: str | None = _option(None, "a transformers causal LM: local folder or hub id")
    init: str | None = _option(None, "config.json of a model with random weights, instead of --model")
    tokenizer: str | None = _option(None, "counts the tokens of texts: folder or hub id; by default the model's")
    token_cap: int | None = _option(None, "most tokens in one pack, longer ones are cut; by default the longest's")
    samples_per_rank: int = _option(4, "samples per rank and minibatch")
    minibatches: int = _option(4, "minibatches to time in each round, after one to warm up")
    rounds: int = _option(3, "how often every way has its turn")
    variants: str | None = _option(None, "only these, by the names in the table, with commas between; by default all")
    device: Literal["auto", "cpu", "cuda"] = _option("auto", "auto: cuda where there is a GPU for every rank")
    dtype: Literal["fp32", "bf16"] | None = _option(None, "dtype of compute; by default bf16 on GPUs, fp32 on the CPU")
    gradient_checkpointing: bool = _option(False, "recompute activations in backward")
    seed: int = _option(0, "of the random weights, tokens and the samples' order")

    def __post_init__(self) -> None:
        if (self.model is None) == (self.init is None):
            raise ValueError("give either --model (pretrained) or --init (random weights)")
        for name in ("samples_per_rank", "minibatches", "rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give at least 1")
        if self.token_cap is not None and self.token_cap < LEAST:
            raise ValueError(f"token_cap is {self.token_cap}; a sample needs a token to predict and one before it: 2")
        for name, path in (("init", self.init), ("lengths", self.lengths)):
            if path is not None and not Path(path).is_file():
                raise ValueError(f"{name} is {path}: there is no such file")
        if Path(self.out).exists() and not Path(self.out).is_dir():
            raise ValueError(f"out is {self.out}, which is a file; give a folder")
