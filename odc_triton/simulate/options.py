"""What can be chosen for `odc-triton simulate`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    """The simulated job."""

    lengths: str = field(metadata={"help": "longalign, swe-smith, aime, or a file: .jsonl, .json, .npz, or numbers"})
    model: str = _option("qwen2.5-7b", "a known name, or a transformers config.json")
    gpus: int = _option(8, "GPUs of the job, all nodes together")
    nodes: int = _option(1, "nodes, of equally many GPUs")
    gpu: str | None = _option(None, "kind of GPU: v100, a100, a6000, l40s, h100, h200, b200; of --topology, or a100")
    topology: str | None = _option(None, "snapshot of one node's GPUs and links (JSON)")
    minibatch: str = _option("1,2,4,8", "samples per GPU and optimizer step; several with commas")
    token_cap: int | None = _option(None, "most tokens in one microbatch; by default the longest sequence")
    hybrid: bool = _option(True, "of several nodes, each holds a whole copy of the parameters in shards")
    checkpointing: bool = _option(True, "recompute activations in backward: less memory, a third more work")
    fused_head: bool = _option(True, "logits are never made whole")
    efficiency: float = _option(0.5, "reached share of the GPU's peak in FLOP/s")
    link_efficiency: float = _option(0.8, "reached share of the links' nominal bandwidth")
    nic_gbs: float | None = _option(None, "GB/s per GPU and direction between nodes; by default usual for the GPU")
    slow: float = _option(1.0, "one rank computes this many times slower")
    jitter: float = _option(0.0, "relative deviation of each layer's compute time")
    trials: int | None = _option(None, "minibatches drawn per setting; by default 16, fewer beyond 32 GPUs")
    seed: int = _option(0, "of the minibatches drawn and the jitter")
    out: str | None = _option(None, "folder to write table.md, simulate.json, timeline.png and trace.json to")

    def __post_init__(self) -> None:
        for name in ("gpus", "nodes", "trials"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: give 1 or more")
        if self.gpus % self.nodes:
            raise ValueError(f"{self.gpus} gpus don't divide over {self.nodes} nodes: give a multiple of {self.nodes}")
        if self.token_cap is not None and self.token_cap < 1:
            raise ValueError(f"token_cap is {self.token_cap}: give 1 or more")
        for name in ("efficiency", "link_efficiency"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it lies above 0 and at most at 1")
        if self.nic_gbs is not None and not 0 < self.nic_gbs < math.inf:
            raise ValueError(f"nic_gbs is {self.nic_gbs}: it is positive and finite")
        if not 0 < self.slow < math.inf:
            raise ValueError(f"slow is {self.slow}: it is positive and finite, 1.3 for 30% longer")
        if not 0 <= self.jitter < math.inf:
            raise ValueError(f"jitter is {self.jitter}: it is 0 or more, 0.05 for 5%")
        if self.out is not None and Path(self.out).exists() and not Path(self.out).is_dir():
            raise ValueError(f"out is {self.out}, which is a file: give a folder")
        if not self.minibatches:
            raise ValueError("minibatch is empty: give samples per GPU, as 1,2,4,8")

    @property
    def minibatches(self) -> list[int]:
        """Raises ValueError for what is no number of 1 or more."""
        sizes = []
        for part in filter(None, (part.strip() for part in self.minibatch.split(","))):
            if not part.isdecimal() or int(part) < 1:
                raise ValueError(f"minibatch has {part!r}: give whole numbers of 1 or more with commas, as 1,2,4,8")
            sizes.append(int(part))
        return sizes
