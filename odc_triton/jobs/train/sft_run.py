"""Supervised fine-tuning on one rank: the samples of a step, and of an evaluation."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from ...nn.modes import evaluating
from ...objectives.cross_entropy import CrossEntropy, Distillation
from ...packs.collate import Pack, PackedDataset, pack_collate
from ...packs.pack_loader import tower_costs
from ...packs.router_loss import router_weight
from ...plan.cost import CostModel
from ...plan.entries import Entry
from ...plan.planner import make_plan
from ...plan.queue import QUEUE
from ...plan.relatives import Relatives, find_relatives
from ...plan.sampler import MinibatchSampler
from ...plan.samples import Limits, Samples
from ...plan.split import readable_tokens
from ...recurrent.layers import most_cuts_of
from ...sequence.buffers import CUTS
from ...sequence.enable import enable_split
from ...sequence.exchange import SequenceExchange
from ...step import evaluate
from ..data.dataset import PreparedSamples
from .metrics import Metrics
from .prepare import Prepared
from .run import Run, shared_counter
from .sft_options import SftOptions


class SftRun(Run):
    """Supervised fine-tuning on `data`, packed."""

    bar: ClassVar[dict[str, Any]] = {
        "loss": ("loss", ".4f"),
        "targets/s": ("target_tokens_per_s", ".0f"),
        "idle": ("idle", ".0%"),
        "eval": ("eval_loss", ".4f"),
    }
    options: SftOptions

    def __init__(
        self,
        *,
        options: SftOptions,
        model: nn.Module,
        teacher: nn.Module | None,
        prepared: Prepared[PreparedSamples],
        cost: CostModel,
    ) -> None:
        """`teacher`: to learn from, sharded as `model` is."""
        super().__init__(options=options, model=model, prepared=prepared)
        data, grid = prepared.data, self.engine.grid
        lengths = data.lengths.tolist()
        splits = options.split_sequences and grid.shards > 1
        over = sum(length > options.token_cap for length in lengths)
        over = min(over, options.samples_per_rank * grid.shards)
        cuts = most_cuts_of([model, teacher], over, options.split_cuts)
        self.sampler = MinibatchSampler(
            lengths,
            options.samples_per_rank,
            options.token_cap,
            balance=options.balance,
            seed=options.seed,
            rank=grid.rank,
            world=grid.world,
            cost=cost,
            drop_last=True,
            counter=shared_counter(options, grid) if options.balance == QUEUE else None,
            split=splits and (options.split_tokens or True),
            split_cuts=cuts,
            replicas=grid.replicas,
            mix=prepared.mix,
            relatives=self._relatives(cost) if options.share_prefixes else None,
            extra=tower_costs(model, data.images),
            floors=data.floors,
            targets=data.target_counts.tolist(),
        )
        if splits:
            self._enable_split(teacher, cuts)
        self.teacher = self.teacher_of(teacher)
        self.objective = CrossEntropy() if self.teacher is None else Distillation(teacher=self.teacher)
        self._minibatches = chain.from_iterable(repeat(self.sampler))  # this rank's packs, of one epoch after another

    def _relatives(self, cost: CostModel) -> Relatives:
        """Who shares how much. Rank 0 prints the sum."""
        relatives = find_relatives(self.data.undecoded())
        if self.engine.rank == 0:
            tokens, part = relatives.savings(cost, token_cap=self.options.token_cap)
            total = sum(relatives.lengths)
            print(f"--share-prefixes saves {tokens} of {total} tokens, {part:.0%} of the time, at most", flush=True)
        return relatives

    def _enable_split(self, teacher: nn.Module | None, cuts: int | None) -> None:
        """Of the model and its teacher. Raises ValueError if the longest sample, also of those to evaluate on, can't be
        split, or the one with the most tokens before the end of its images.
        """
        tokens, shards, cap = self.sampler.split_tokens, self.engine.grid.shards, self.options.token_cap
        checked = []  # (number, tokens, earliest cut)
        for data in (self.data, self.evaluation):
            if data is not None:
                lengths = data.lengths.tolist()
                measured = [*zip(range(len(lengths)), lengths, data.floors or [0] * len(lengths), strict=True)]
                checked += [max(measured, key=lambda each: (each[1] > cap, each[place])) for place in (1, 2)]
        for _, length, floor in checked:
            if length > cap and not self.options.split_tokens:
                how = {"token_cap": cap, "cost": self.sampler.cost}
                tokens = max(tokens, readable_tokens([length], floors=[floor], ranks=shards, samples=1, **how))
        for number, length, floor in checked:
            limits = Limits(ranks=shards, token_cap=cap, split_tokens=tokens)
            sample = Samples.of(limits.checked([length]), self.sampler.cost, names=[number], earliest_cuts=[floor])
            make_plan(sample, limits)  # raises if it can't be split
        for model in (self.model, teacher):
            if model is not None:
                enable_split(model, tokens, cuts=cuts or CUTS)

    @staticmethod
    def _collate_of(data: PreparedSamples) -> Callable[[list[Entry]], Pack]:
        dataset = PackedDataset(data)
        return lambda pack: pack_collate([dataset[pack]])[0]

    def train_step(self) -> Metrics:
        start_s = time.monotonic()
        collate, has_images = self._collate_of(self.data), self.data.images is not None
        report = self.step(partial(next, self._minibatches), self.objective, collate=collate, ahead=has_images)
        tokens, more = report.terms, {}
        if router_weight(self.model):
            more["aux_loss"] = report.sums["router"] / self.per_step
        if self.teacher is not None:
            more["divergence"] = report.sums["divergence"] / tokens
        self.state.sampler = place = self.sampler.state_dict()
        epoch = place["epoch"] + place["minibatch"] / self.epoch_steps
        return self.stepped(start_s, tokens, {"epoch": epoch, "loss": report.sums["token_loss"] / tokens, **more})

    def in_words(self) -> str:
        samples, left = len(self.mix), len(self.mix) % self.per_step
        rest = f", {left} of {samples} samples don't fill a step and are left out, others in each epoch"
        return super().in_words() + rest * bool(left)

    def evaluate(self) -> Metrics:
        return {"eval_loss": self.mean_loss(self.evaluation)}

    def mean_loss(self, data: PreparedSamples) -> float:
        """Mean loss over all targets of `data`, of which each rank evaluates its share."""
        grid = self.engine.grid
        limits = Limits(ranks=grid.world, token_cap=self.options.token_cap, replicas=grid.replicas)
        if (exchange := self.engine.participant(SequenceExchange)) is not None:
            limits = replace(limits, split_tokens=exchange.tokens, split_cuts=exchange.split_cuts)
        samples = Samples.of(
            limits.checked(data.lengths.tolist()),
            self.sampler.cost,
            learned=data.target_counts.tolist(),
            earliest_cuts=data.floors,
            extra=tower_costs(self.model, data.images),
        )
        fit = [index for index, length in enumerate(samples.tokens) if length <= limits.token_cap]
        longer = sorted({*samples.names} - {*fit})
        plans = [make_plan(samples.some(fit), replace(limits, split_tokens=0))]
        # Each replica splits one of the others over all its ranks.
        each = grid.replicas
        plans += [make_plan(samples.some(longer[at : at + each]), limits) for at in range(0, len(longer), each)]
        own, purpose = [plan.packs(grid.rank) for plan in plans], f"evaluation after step {self.state.step}"
        with evaluating(self.model, but=self.model.get_output_embeddings()):
            how = {"collate": self._collate_of(data), "ahead": data.images is not None}
            report = evaluate(self.model, own, CrossEntropy(), purpose=purpose, **how)
        self.idle.restart()
        return report.loss / report.terms if math.isfinite(report.loss) else math.nan

    def resume(self, saved: dict[str, Any], where: Path) -> str:
        changed = super().resume(saved, where)
        self.sampler.load_state_dict(self.state.sampler)
        return changed
