"""Where a training run stands: all that a resumed run needs beside the model's and the optimizer's shards."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(kw_only=True)
class RunState:
    """One explicit object, so that saving a run is saving this and the shards.

    The learning rate is a function of `step`; the random numbers are this rank's own (dropout), the samples' order
    is a function of the sampler's seed and position.
    """

    step: int = 0  # optimizer steps taken
    tokens: int = 0  # targets learned so far, all ranks
    sampler: dict[str, int] = field(default_factory=dict)
    torch_rng: torch.Tensor | None = None
    python_rng: Any = None

    def capture_rng(self) -> None:
        self.torch_rng = torch.get_rng_state()
        self.python_rng = random.getstate()

    def restore_rng(self) -> None:
        if self.torch_rng is not None:
            torch.set_rng_state(self.torch_rng)
        if self.python_rng is not None:
            random.setstate(self.python_rng)
