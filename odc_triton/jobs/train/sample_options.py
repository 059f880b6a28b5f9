"""Options of jobs that learn prepared samples. Imports no torch, so that `--help` is quick."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from ..options.options import REQUIRED, option
from .run_options import RunOptions


@dataclass(frozen=True, kw_only=True)
class SampleOptions(RunOptions):
    """A training run on prepared samples."""

    data: tuple[str, ...] = option(
        REQUIRED,
        "a file (JSON lines, JSON, Parquet, CSV, Arrow), a folder of them or a hub id; repeatable; docs/data.md",
    )
    steps: int | None = option(None, "optimizer steps; instead of --epochs", group="Steps")
    epochs: float | None = option(None, "passes over the data; 1 if neither this nor --steps is given", group="Steps")
    truncate: bool = option(False, "cut samples longer than --token-cap; without it they are an error")
    drop_long: bool = option(False, "leave out samples longer than --token-cap")
    eval_fraction: float = option(0.0, "fraction of --data to hold out for evaluation", group="Evaluation")

    alternatives: ClassVar[tuple[tuple[str, str], ...]] = (
        *RunOptions.alternatives,
        *(("steps", "epochs"), ("truncate", "drop_long"), ("eval_data", "eval_fraction")),
    )
    positive: ClassVar[tuple[str, ...]] = (*RunOptions.positive, "epochs")
    shortens: ClassVar[str] = "--truncate or --drop-long"
    adjustable: ClassVar[frozenset[str]] = RunOptions.adjustable | {"epochs"}
    pairs: ClassVar[bool] = False  # samples 2i and 2i + 1 are one
    more_tokens: ClassVar[int] = 0  # of a sample, that are computed in addition to those of its record

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.eval_fraction < 1:
            raise ValueError(f"--eval-fraction is {self.eval_fraction}; it must be at least 0 and less than 1")

    @property
    def evaluates(self) -> bool:
        return self.eval_data is not None or self.eval_fraction > 0

    @property
    def too_long(self) -> Literal["error", "truncate", "drop"]:
        return "truncate" if self.truncate else "drop" if self.drop_long else "error"
