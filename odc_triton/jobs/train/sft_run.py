"""Supervised fine-tuning on one rank: the samples of a step, and of an evaluation."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from ...checkpoint.repeat import Replayable
from ...engine.api import engine_of
from ...engine.minibatch import minibatch
from ...nn.modes import evaluating
from ...packs.collate import Pack, PackedDataset, count_target_tokens, pack_collate, to_device
from ...packs.loss import router_predictions, summed_losses
from ...packs.pack_loader import tower_costs
from ...packs.router_loss import router_weight
from ...plan.cost import CostModel
from ...plan.entries import Entry
from ...plan.order import Mix
from ...plan.plan import MinibatchPacks
from ...plan.planner import make_plan
from ...plan.queue import QUEUE, QueuedPacks
from ...plan.relatives import Relatives, find_relatives
from ...plan.sampler import MinibatchSampler
from ...plan.samples import Limits, Samples
from ...plan.split import readable_tokens
from ...sequence.enable import enable_split, split_forward
from ...sequence.exchange import SequenceExchange
from ..data.dataset import PreparedSamples
from .metrics import Metrics
from .run import Run, shared_counter
from .sft_options import SftOptions
from .vision import one_ahead


class SftRun(Run):
    """Supervised fine-tuning on `data`, packed."""

    kind = "train sft"
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
        teacher: nn.Module | None = None,
        data: PreparedSamples,
        evaluation: PreparedSamples | None = None,
        mix: Mix | None = None,
        cost: CostModel | None = None,
        identity: dict[str, Any] | None = None,
    ) -> None:
        """`teacher`: to learn from, sharded as `model` is. `mix`: of `data` in an epoch; by default each once."""
        self.data, self.evaluation = data, evaluation
        engine = engine_of(model)
        lengths = data.lengths.tolist()
        splits = options.split_sequences and engine.grid.shards > 1
        self.sampler = MinibatchSampler(
            lengths,
            options.samples_per_rank,
            options.token_cap,
            balance=options.balance,
            seed=options.seed,
            rank=engine.rank,
            world=engine.world,
            cost=cost,
            drop_last=True,
            counter=shared_counter(options, engine.world) if options.balance == QUEUE else None,
            split=splits and (options.split_tokens or True),
            replicas=engine.grid.replicas,
            mix=mix,
            relatives=self._relatives(options, cost, engine.rank) if options.share_prefixes else None,
            extra=tower_costs(model, data.pictures),
            floors=data.floors,
            targets=data.target_counts.tolist(),
        )
        super().__init__(options=options, model=model, identity=identity, epoch_steps=len(self.sampler))
        if splits:
            self._enable_split(teacher)
        self.teacher = self.teacher_of(teacher)
        self._epoch = iter(self.sampler)

    def _relatives(self, options: SftOptions, cost: CostModel | None, rank: int) -> Relatives:
        """Who shares how much. Rank 0 prints the sum."""
        relatives = find_relatives(self.data.undecoded())
        if rank == 0:
            tokens, part = relatives.savings(cost or CostModel.paper_7b(), token_cap=options.token_cap)
            total = sum(relatives.lengths)
            print(f"--share-prefixes saves {tokens} of {total} tokens, {part:.0%} of the time, at most", flush=True)
        return relatives

    def _enable_split(self, teacher: nn.Module | None) -> None:
        """Of the model and its teacher. Raises ValueError if the longest sample, also of those to evaluate on, can't be
        split, or the one with the most tokens before the end of its pictures.
        """
        tokens, shards, cap = self.sampler.split_tokens, self.engine.grid.shards, self.options.token_cap
        checked = []  # (number, tokens, floor)
        for data in (self.data, self.evaluation):
            if data is not None:
                lengths = data.lengths.tolist()
                measured = [*zip(range(len(lengths)), lengths, data.floors or [0] * len(lengths), strict=True)]
                checked += [max(measured, key=lambda each: (each[1] > cap, each[place])) for place in (1, 2)]
        for _, length, floor in checked:
            if length > cap and not self.options.split_tokens:
                needed = readable_tokens([length], floors=[floor], ranks=shards, samples=1, **self._limits)
                tokens = max(tokens, needed)
        for number, length, floor in checked:
            limits = Limits(ranks=shards, token_cap=cap, split_tokens=tokens)
            sample = Samples.of(limits.checked([length]), self.sampler.cost, names=[number], earliest_cuts=[floor])
            make_plan(sample, limits)  # raises if it can't be split
        for model in (self.model, teacher):
            if model is not None:
                enable_split(model, tokens)

    @property
    def _limits(self) -> dict[str, Any]:
        return {"token_cap": self.sampler.token_cap, "cost": self.sampler.cost}

    # ------------------------------------------------------------------ a step

    def next_packs(self) -> MinibatchPacks | QueuedPacks:
        """This rank's packs of the next minibatch. Starts a new epoch when one ends."""
        own = next(self._epoch, None)
        if own is None:
            self._epoch = iter(self.sampler)
            own = next(self._epoch)
        return own

    def _made(self, data: PreparedSamples, packs: Iterable[list[Entry]]) -> Iterator[Pack]:
        """Packs as they are needed; those with pictures one ahead, but for a queue's, which others could take."""
        dataset = PackedDataset(data)

        def collated(members: list[Entry]) -> Pack:
            (pack,) = pack_collate([dataset[members]])
            return pack

        ahead = data.pictures is not None and not isinstance(packs, QueuedPacks)
        return one_ahead(collated, packs) if ahead else map(collated, packs)

    def train_step(self) -> Metrics:
        start_s = time.monotonic()
        sums, tokens = self._minibatch()
        lr = self.lr
        agreed = self.update(sums[0].item(), sums[1:].tolist())
        more = {}
        if router_weight(self.model):
            more["aux_loss"] = agreed.sums[0] / self.sampler.samples_per_minibatch
        if self.teacher is not None:
            more["divergence"] = agreed.sums[1] / tokens
        self.state.tokens += tokens
        self.state.sampler = self.sampler.state_dict()
        took_s = time.monotonic() - start_s
        return self.stepped(
            {
                "epoch": self.state.sampler["epoch"] + self.state.sampler["minibatch"] / self.epoch_steps,
                "loss": agreed.loss_sum / tokens,
                **more,
                "lr": lr,
                "grad_norm": agreed.norm,
                "tokens": self.state.tokens,
                "target_tokens_per_s": tokens / took_s,
                "idle": agreed.idle,
                "seconds": took_s,
            }
        )

    def _minibatch(self) -> tuple[torch.Tensor, int]:
        """This rank's sums of `_losses` over its packs, [3], and the targets of all ranks, after the reduction."""
        device = self.engine.heap.device
        weight = router_weight(self.model) / self.sampler.samples_per_minibatch  # in all, as the rest is dropped
        own = cache(self.next_packs)  # at the entry, so that its error is every rank's

        @cache
        def packs() -> Iterable[Pack]:
            made = self._made(self.data, own())  # during iteration; of a queue they are taken then
            return Replayable(made) if self.engine.deterministic else made  # which keeps them all

        def run() -> tuple[torch.Tensor, int]:
            sums = torch.zeros(3, dtype=torch.float64, device=device)
            with minibatch(self.model, plan=own) as mb:
                for pack in packs():
                    self.stop_signal.check_peers()
                    losses = self._losses(to_device(pack, device))
                    (losses[0] / mb.tokens + weight * losses[1]).backward()
                    sums += torch.stack(losses).detach()
            return sums, mb.tokens

        return self.run_minibatch(run)

    def _losses(self, pack: Pack) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of a pack the summed loss, that of its samples' routers, and the divergence from the teacher, if any."""
        logits, targets, router = router_predictions(self.model, pack, bool(router_weight(self.model)))
        nothing, weight = torch.zeros_like(router), 0.0 if self.teacher is None else self.teacher.weight
        own = F.cross_entropy(logits.float(), targets, reduction="sum") if weight < 1 else nothing
        if self.teacher is None:
            return own, router, nothing
        apart = self.teacher.divergence(logits, pack).sum()
        return weight * apart + (1 - weight) * own, router, apart

    # ------------------------------------------------------------------ evaluation

    def in_words(self) -> str:
        samples, left = len(self.sampler.mix), len(self.sampler.mix) % self.sampler.samples_per_minibatch
        rest = f", {left} of {samples} samples don't fill a step and are left out, others in each epoch"
        return super().in_words() + rest * bool(left)

    @property
    def evaluates(self) -> bool:
        return self.evaluation is not None

    def evaluate(self) -> Metrics:
        return {"eval_loss": self.mean_loss(self.evaluation)}

    @torch.no_grad()
    def mean_loss(self, data: PreparedSamples) -> float:
        """Mean loss over all targets of `data`. Each rank evaluates its share; no minibatch, one barrier."""
        device, grid = self.engine.heap.device, self.engine.grid
        limits = Limits(ranks=grid.world, token_cap=self.options.token_cap, replicas=grid.replicas)
        if (exchange := self.engine.participant(SequenceExchange)) is not None:
            limits = replace(limits, split_tokens=exchange.tokens)
        columns = {"extra": tower_costs(self.model, data.pictures), "earliest_cuts": data.floors}
        samples = Samples.of(limits.checked(data.lengths.tolist()), self.sampler.cost, **columns)
        fit = [index for index, length in enumerate(samples.tokens) if length <= limits.token_cap]
        longer = sorted({*samples.names} - {*fit})
        loss_sum, targets = torch.zeros((), dtype=torch.float64, device=device), 0
        with evaluating(self.model):
            self.model.get_output_embeddings().train()  # a fused head computes whole logits in evaluation
            plans = [make_plan(samples.some(fit), replace(limits, split_tokens=0))]
            # Each replica splits one of the others over all its ranks.
            each = grid.replicas
            plans += [make_plan(samples.some(longer[at : at + each]), limits) for at in range(0, len(longer), each)]
            for plan in plans:
                reads = nullcontext() if plan.segments is None else split_forward(self.model, plan.segments)
                with reads:
                    for collated in self._made(data, plan.packs(grid.rank)):
                        loss_sum += summed_losses(self.model, to_device(collated, device))[0]
                        targets += count_target_tokens([collated])
        own = {"loss_sum": loss_sum.item(), "targets": targets}
        messages = self.engine.exchange(f"evaluation after step {self.state.step}", own)
        self.reset_timer()
        total = sum(each["loss_sum"] for each in messages)
        return total / sum(each["targets"] for each in messages) if math.isfinite(total) else math.nan

    def resume(self, saved: dict[str, Any], where: Path) -> str:
        changed = super().resume(saved, where)
        self.sampler.load_state_dict(self.state.sampler)
        self._epoch = iter(self.sampler)
        return changed
