"""Options of jobs that learn from preference pairs. Imports no torch, so that `--help` is quick."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from ..options.options import REQUIRED, flag, option
from .sample_options import SampleOptions

_NOT_OF_PAIRS = ("teacher", "split_sequences")  # and those that go with them
_GO_WITH_THEM = ("teacher_beta", "teacher_temperature", "teacher_weight", "split_tokens", "split_cuts")


@dataclass(frozen=True, kw_only=True)
class PairOptions(SampleOptions):
    """Learning from preference pairs."""

    data: tuple[str, ...] = option(
        REQUIRED,
        "pairs: a file, folder or hub id with `chosen` and `rejected`, text or messages, and maybe `prompt`; "
        "repeatable; docs/preferences.md",
    )
    pairs_per_rank: int = option(8, "pairs per rank and optimizer step, on average", group="Steps")
    share_prefixes: Literal["auto", "off"] = option(
        "auto", "auto: compute once what samples of a microbatch begin with, as a pair's prompt; off: for each of them"
    )

    per_rank: ClassVar[str] = "pairs_per_rank"
    free: ClassVar[frozenset[str]] = SampleOptions.free | {"share_prefixes"}
    hidden: ClassVar[frozenset[str]] = frozenset((*_NOT_OF_PAIRS, *_GO_WITH_THEM))
    pairs: ClassVar[bool] = True

    def _check_contradictions(self) -> None:
        for name in _NOT_OF_PAIRS:
            if getattr(self, name):
                raise ValueError(
                    f"{flag(name)} is {getattr(self, name)}, and train {self.job} has none: leave it out, or use train "
                    f"sft"
                )
        super()._check_contradictions()

    def identity(self, world: int) -> dict[str, object]:
        return {"job": self.job, **super().identity(world)}


@dataclass(frozen=True, kw_only=True)
class DpoOptions(PairOptions):
    """Direct preference optimisation (DPO)."""

    lr: float = option(1e-6, "peak learning rate; Muon's is scaled to match AdamW's")
    beta: float = option(0.1, "how strongly the model is held to its start", group="Loss")
    loss: Literal["sigmoid", "hinge", "ipo"] = option("sigmoid", "as TRL's loss_type")

    job: ClassVar[str] = "dpo"
    adjustable: ClassVar[frozenset[str]] = PairOptions.adjustable | {"beta"}
    positive: ClassVar[tuple[str, ...]] = (*PairOptions.positive, "beta")

    def _check_contradictions(self) -> None:
        super()._check_contradictions()
        if self.init is not None and self.lora_rank:
            raise ValueError("--init has random weights, and adapters need a model to adapt: give --model")


@dataclass(frozen=True, kw_only=True)
class OrpoOptions(PairOptions):
    """Odds ratio preference optimisation (ORPO), without a reference model."""

    lr: float = option(8e-6, "peak learning rate; Muon's is scaled to match AdamW's")
    beta: float = option(0.1, "weight of the odds ratio's part of the loss", group="Loss")

    job: ClassVar[str] = "orpo"
    adjustable: ClassVar[frozenset[str]] = PairOptions.adjustable | {"beta"}
    positive: ClassVar[tuple[str, ...]] = (*PairOptions.positive, "beta")


@dataclass(frozen=True, kw_only=True)
class RewardOptions(PairOptions):
    """Training a reward model: a sequence classifier whose score is larger for the chosen sample."""

    center: float = option(0.0, "weight of the squared sum of a pair's scores, which keeps them around 0", group="Loss")

    job: ClassVar[str] = "reward"
    more_tokens: ClassVar[int] = 1  # whose place is scored by the one before it
    adjustable: ClassVar[frozenset[str]] = PairOptions.adjustable | {"center"}
    not_negative: ClassVar[tuple[str, ...]] = (*PairOptions.not_negative, "center")
