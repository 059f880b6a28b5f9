"""Where a training run stands: all that a resumed run needs beside the model's and the optimizer's shards."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(kw_only=True)
class RunState:
    """The same on every rank. Saving a run is saving this, the shards and each rank's random numbers.

    The learning rate is a function of `step`; the samples' order is a function of the sampler's seed and position.
    """

    step: int = 0  # optimizer steps taken, skipped ones counted
    tokens: int = 0  # targets learned so far, all ranks
    skipped: int = 0  # steps whose loss or gradient was not finite
    sampler: dict[str, int] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> RunState:
        """Raises TypeError for other fields than `as_json` has."""
        return cls(**saved)
