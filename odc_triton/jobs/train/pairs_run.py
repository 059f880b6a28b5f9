"""Learning from preference pairs on one rank: the pairs of a step, and of an evaluation."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from torch import nn

from ...nn.modes import evaluating
from ...objectives.dpo import DPO, Logits
from ...objectives.orpo import ORPO
from ...objectives.pairs import PairObjective
from ...objectives.reward import BradleyTerry
from ...packs.enable import innermost, takes_branches
from ...packs.loss import NO_ROUTER_LOSS, refuse_router_loss
from ...packs.reference import Reference
from ...plan.cost import CostModel
from ...plan.fields import IGNORED
from ...plan.order import in_passes
from ...plan.plan import MinibatchPacks
from ...plan.planner import Planner
from ...plan.relatives import find_relatives
from ...plan.samples import Limits, Samples
from ...step import evaluate
from ..data.dataset import PreparedSamples
from .metrics import Metrics
from .pairs_options import DpoOptions, OrpoOptions, PairOptions, RewardOptions
from .prepare import Prepared
from .run import Run

Rows = Sequence[dict[str, np.ndarray]]


class PairRun(Run):
    """DPO, ORPO or a reward model, on packed pairs."""

    bar: ClassVar[dict[str, Any]] = {
        "loss": ("loss", ".4f"),
        "accuracy": ("rewards/accuracies", ".0%"),
        "margin": ("rewards/margins", ".3f"),
        "idle": ("idle", ".0%"),
        "eval": ("eval_loss", ".4f"),
    }
    options: PairOptions

    def __init__(
        self,
        *,
        options: PairOptions,
        model: nn.Module,
        reference: Logits | None,
        prepared: Prepared[PreparedSamples],
        cost: CostModel,
    ) -> None:
        """`reference`: of DPO, the logits of a pack by the model at the start."""
        refuse_router_loss(model, f"which train {options.job} leaves out: {NO_ROUTER_LOSS}")
        super().__init__(options=options, model=model, prepared=prepared)
        self.reference, self.cost, grid = reference, cost, self.engine.grid
        models = [model, *([reference.model] if isinstance(reference, Reference) else ())]
        self.shares = options.share_prefixes == "auto" and all(takes_branches(innermost(each)) for each in models)
        limits = Limits(ranks=grid.world, token_cap=options.token_cap, replicas=grid.replicas)
        self.planner = Planner(limits=limits)
        self._padding = innermost(model).config.get_text_config().pad_token_id

    def train_step(self) -> Metrics:
        start_s, step = time.monotonic(), self.state.step
        pairs = in_passes(self.mix, step, self.per_step, seed=f"pairs {self.options.seed}")
        every = self._samples(self.data)
        rows = [every[2 * pair + side] for pair in pairs for side in (0, 1)]  # a pair may be of two passes
        objective = self._objective(rows)
        report = self.step(lambda: self._packs(rows, range(len(pairs))), objective, collate=objective.collate)
        tokens = int(self.data.target_counts.reshape(-1, 2)[pairs].sum())
        epoch = (step + 1) * self.per_step / len(self.mix)
        return self.stepped(start_s, tokens, {"epoch": epoch, **objective.means(report.sums)})

    def _samples(self, data: PreparedSamples) -> Rows:
        return _Scored(data, self._padding) if isinstance(self.options, RewardOptions) else data  # pyright: ignore

    def _objective(self, rows: Rows) -> PairObjective:
        options = self.options
        if isinstance(options, RewardOptions):
            return BradleyTerry(samples=rows, center=options.center)
        if isinstance(options, OrpoOptions):
            return ORPO(samples=rows, beta=options.beta)
        assert isinstance(options, DpoOptions)
        assert self.reference is not None
        return DPO(samples=rows, reference=self.reference, beta=options.beta, kind=options.loss)

    def _packs(self, rows: Rows, pairs: Sequence[int]) -> MinibatchPacks:
        """This rank's packs of a minibatch of these pairs."""
        names = [2 * pair + side for pair in pairs for side in (0, 1)]
        samples = [rows[name] for name in names]
        planned = Samples.of(
            self.planner.limits.checked([len(each["input_ids"]) for each in samples]),
            self.cost,
            names=names,
            prefixes=find_relatives(samples) if self.shares else None,
            groups=[name // 2 for name in names],
        )
        return self.planner.packs(planned, self.engine.rank)

    def evaluate(self) -> Metrics:
        assert self.evaluation is not None
        rows, purpose = self._samples(self.evaluation), f"evaluation after step {self.state.step}"
        objective, count = self._objective(rows), len(rows) // 2
        parts = [range(first, min(first + self.per_step, count)) for first in range(0, count, self.per_step)]
        packs = [self._packs(rows, part) for part in parts]
        with evaluating(self.model, but=self.model.get_output_embeddings()):
            report = evaluate(self.model, packs, objective, purpose=purpose, collate=objective.collate)
        self.idle.restart()
        return {f"eval_{name}": value for name, value in objective.means(report.sums).items()}


class _Scored(Sequence[dict[str, np.ndarray]]):
    """Samples up to the token that transformers scores, the last that is no `padding`, which may be what ends a text;
    and one token more, whose label asks for the score.
    """

    def __init__(self, data: PreparedSamples, padding: int) -> None:
        self._data, self._padding = data, padding

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: Any) -> Any:
        ids = self._data[index]["input_ids"]
        last = int(np.flatnonzero(ids != self._padding).max(initial=0))
        ids = np.append(ids[: last + 1], self._padding)
        return {"input_ids": ids, "labels": np.where(np.arange(len(ids)) == len(ids) - 1, ids, IGNORED)}
