"""Options of supervised fine-tuning. Imports no torch, so that `--help` is quick."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from ...plan.queue import QUEUE
from ...plan.strategies import SPLITTING, STRATEGIES
from ..options.options import REQUIRED, option
from .run_options import RunOptions


@dataclass(frozen=True, kw_only=True)
class SftOptions(RunOptions):
    """Supervised fine-tuning."""

    data: tuple[str, ...] = option(
        REQUIRED,
        "a file (JSON lines, JSON, Parquet, CSV, Arrow), a folder of them or a hub id; repeatable; docs/data.md",
    )
    steps: int | None = option(None, "optimizer steps; instead of --epochs", group="Steps")
    epochs: float | None = option(None, "passes over the data; 1 if neither this nor --steps is given", group="Steps")
    balance: Literal[tuple(STRATEGIES)] = option(
        "mini",
        "how a step's samples are assigned to the ranks. "
        + "; ".join(f"{name}: {strategy.summary}" for name, strategy in STRATEGIES.items()),
    )
    samples_per_rank: int = option(16, "samples per rank and optimizer step, on average")
    share_prefixes: bool = option(
        False,
        "compute once in a microbatch what its samples begin with alike and don't learn, such as a document or the "
        "turns before; samples that share stay together, which is another order of the data",
    )
    truncate: bool = option(False, "cut samples longer than --token-cap; without it they are an error")
    drop_long: bool = option(False, "leave out samples longer than --token-cap")
    fetch_images: bool = option(False, "read pictures from http and https addresses in the data, too")
    router_aux_loss: float | None = option(
        None,
        "weight of the auxiliary loss that balances the routers of a mixture of experts; 0: off; by default as the "
        "model's config says",
        group="What is computed",
    )
    eval_fraction: float = option(0.0, "fraction of --data to hold out for evaluation", group="Evaluation")

    alternatives: ClassVar[tuple[tuple[str, str], ...]] = (
        *RunOptions.alternatives,
        *(("steps", "epochs"), ("truncate", "drop_long"), ("eval_data", "eval_fraction")),
    )
    job: ClassVar[str] = "sft"
    per_rank: ClassVar[str] = "samples_per_rank"
    shortens: ClassVar[str] = "--truncate or --drop-long"
    free: ClassVar[frozenset[str]] = RunOptions.free | {"fetch_images"}
    adjustable: ClassVar[frozenset[str]] = RunOptions.adjustable | {"epochs"}

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_positive("epochs")
        if self.router_aux_loss is not None:
            self._require_not_negative("router_aux_loss")
        if not 0 <= self.eval_fraction < 1:
            raise ValueError(f"--eval-fraction is {self.eval_fraction}; it must be at least 0 and less than 1")

    def _check_contradictions(self) -> None:
        if self.share_prefixes and self.balance != "mini":
            raise ValueError(f"--share-prefixes goes with --balance mini; it is {self.balance}: leave one of them out")
        if self.split_sequences and self.balance not in SPLITTING:
            raise ValueError(
                f"--split-sequences goes with --balance {' or '.join(SPLITTING)}; it is {self.balance}: leave one of "
                "them out"
            )
        if self.split_cuts and not self.split_sequences:
            raise ValueError(f"--split-cuts is {self.split_cuts}: give --split-sequences too, or leave it out")
        super()._check_contradictions()

    def require_replicas(self, replicas: int, ranks: int | None = None) -> None:
        super().require_replicas(replicas, ranks)
        if self.split_sequences and replicas > 1 and self.balance == QUEUE:
            raise ValueError("--split-sequences goes with several replicas only by --balance mini; it is queue")

    @property
    def needs_branches(self) -> bool:
        return self.share_prefixes

    @property
    def evaluates(self) -> bool:
        return self.eval_data is not None or self.eval_fraction > 0

    @property
    def too_long(self) -> Literal["error", "truncate", "drop"]:
        return "truncate" if self.truncate else "drop" if self.drop_long else "error"
