"""Options of supervised fine-tuning. Imports no torch, so that `--help` is quick."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from ...plan.queue import QUEUE
from ...plan.strategies import SPLITTING, STRATEGIES
from ..options.options import option
from .sample_options import SampleOptions


@dataclass(frozen=True, kw_only=True)
class SftOptions(SampleOptions):
    """Supervised fine-tuning."""

    balance: Literal[tuple(STRATEGIES)] = option(
        "mini",
        "how a step's samples are assigned to the ranks. "
        + "; ".join(f"{name}: {strategy.summary}" for name, strategy in STRATEGIES.items()),
        group="Steps",
    )
    samples_per_rank: int = option(16, "samples per rank and optimizer step, on average")
    share_prefixes: bool = option(
        False,
        "compute once in a microbatch what its samples begin with alike and don't learn, such as a document or the "
        "turns before; samples that share stay together, which is another order of the data",
    )
    fetch_images: bool = option(False, "read images from http and https addresses in the data, too")
    router_aux_loss: float | None = option(
        None,
        "weight of the auxiliary loss that balances the routers of a mixture of experts; 0: off; by default as the "
        "model's config says",
        group="What is computed",
    )

    job: ClassVar[str] = "sft"
    per_rank: ClassVar[str] = "samples_per_rank"
    free: ClassVar[frozenset[str]] = SampleOptions.free | {"fetch_images"}
    not_negative: ClassVar[tuple[str, ...]] = (*SampleOptions.not_negative, "router_aux_loss")

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
