"""Supervised fine-tuning on one rank: the samples of a step, and of an evaluation."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
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
from ...plan.order import Mix
from ...plan.pieces import Entry, SplitPlan, begins, number_of
from ...plan.queue import QUEUE, QueuedPacks
from ...plan.relatives import Relatives, find_relatives
from ...plan.sampler import MinibatchSampler
from ...plan.split import assign_split, readable_tokens
from ...plan.strategies import assign_one
from ...sequence.enable import enable_split, split_forward
from ...sequence.exchange import SequenceExchange
from ..data.dataset import Samples
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
        data: Samples,
        evaluation: Samples | None = None,
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
        )
        super().__init__(options=options, model=model, identity=identity, epoch_steps=len(self.sampler))
        if splits:
            self._enable_split(teacher)
        self.teacher = self.teacher_of(teacher)
        self._target_counts = data.target_counts
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
            assign_split([length], floors=[floor], names=[number], ranks=shards, tokens=tokens, **self._limits)
        for model in (self.model, teacher):
            if model is not None:
                enable_split(model, tokens)

    @property
    def _limits(self) -> dict[str, Any]:
        return {"token_cap": self.sampler.token_cap, "cost": self.sampler.cost}

    # ------------------------------------------------------------------ a step

    def next_packs(self) -> tuple[int, Iterable[Pack], SplitPlan | None]:
        """The targets that this rank counts in the next minibatch, its packs, and the plan of their pieces. Starts a
        new epoch when one ends.

        Packs are made during iteration, with a queue they are also taken then. Each rank counts a part of the samples:
        with a queue any, else those that begin in its packs.
        """
        own = next(self._epoch, None)
        if own is None:
            self._epoch = iter(self.sampler)
            own = next(self._epoch)
        if isinstance(own, QueuedPacks):
            return int(self._target_counts[own.own_part()].sum()), self._made(self.data, own), own.split
        begun = [number_of(each) for pack in own for each in pack if begins(each)]
        return int(self._target_counts[begun].sum()), self._made(self.data, own), own.split

    def _made(self, data: Samples, packs: Iterable[list[Entry]]) -> Iterator[Pack]:
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
        problem: Exception | None = None
        try:
            counted, packs, split = self.next_packs()
        except Exception as error:  # raised inside the minibatch, so that it fails on all ranks
            counted, packs, split, problem = 0, [], None, error
        packs = Replayable(packs) if self.engine.deterministic else packs  # which keeps them all

        def run() -> tuple[torch.Tensor, int]:
            sums = torch.zeros(3, dtype=torch.float64, device=device)
            with minibatch(self.model, tokens=counted, split=split) as mb:
                if problem is not None:
                    raise problem
                for pack in packs:
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
    def mean_loss(self, data: Samples) -> float:
        """Mean loss over all targets of `data`. Each rank evaluates its share; no minibatch, one barrier."""
        lengths, device = data.lengths.tolist(), self.engine.heap.device
        grid = self.engine.grid
        fit = [index for index, length in enumerate(lengths) if length <= self.options.token_cap]
        extra = tower_costs(self.model, data.pictures)
        loss_sum, targets = torch.zeros((), dtype=torch.float64, device=device), 0

        def of(values: list[Any] | None, some: list[int]) -> list[Any] | None:
            return None if values is None else [values[index] for index in some]

        def add(packs: Iterable[list[Entry]]) -> None:
            nonlocal loss_sum, targets
            for collated in self._made(data, packs):
                loss_sum += summed_losses(self.model, to_device(collated, device))[0]
                targets += count_target_tokens([collated])

        with evaluating(self.model):
            self.model.get_output_embeddings().train()  # a fused head computes whole logits in evaluation
            if fit:
                mine = assign_one(
                    [lengths[index] for index in fit],
                    rank=grid.rank,
                    ranks=grid.world,
                    balance="mini",
                    extra=of(extra, fit),
                    **self._limits,
                )
                add([fit[at] for at in pack] for pack in mine)
            longer = sorted(set(range(len(lengths))) - set(fit))
            for at in range(0, len(longer), grid.replicas):  # each replica splits one of them over all its ranks
                some = longer[at : at + grid.replicas]
                assigned = assign_split(
                    [lengths[index] for index in some],
                    ranks=grid.world,
                    replicas=grid.replicas,
                    tokens=self.engine.participant(SequenceExchange).tokens,
                    names=some,
                    extra=of(extra, some),
                    floors=of(data.floors, some),
                    **self._limits,
                )
                with split_forward(self.model, assigned.plan):
                    add(assigned.packs(grid.rank))
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
