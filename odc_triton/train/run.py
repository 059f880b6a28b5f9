"""One rank's side of a training run: one step, one evaluation, and the state to save.

The ranks exchange numbers once a step, when all gradients have landed: one meeting, no collective. So every rank knows
the same numbers and makes the same decisions: whether the step is taken, whether a checkpoint is saved, whether the
run stops. Gradients are clipped by these numbers too: torch's `clip_grad_norm_` reduces over gloo or NCCL, which do not
say which peer is dead, and wait for a stopped one without a deadline.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..balance import CostModel, MinibatchSampler, QueuedPacks, store_counter
from ..balance.collate import Pack, PackedDataset, count_target_tokens, pack_collate, to_device
from ..balance.pieces import Entry, SplitPlan
from ..balance.queue import QUEUE, Counter
from ..balance.split import deal_split
from ..balance.strategies import assign
from ..base.errors import MinibatchToRepeat
from ..base.events import Event, total_s
from ..checkpoint.repeat import Kept, repeating
from ..data.dataset import SampleSubset, TokenizedDataset
from ..engine.api import engine_of, minibatch
from ..engine.engine import Engine
from ..hf import summed_loss
from ..sequence.enable import enable_split, split_forward
from .optimizers import make_optimizer, make_schedule
from .run_folder import require_same
from .sft_options import SftOptions


@dataclass(kw_only=True)
class RunState:
    """A run's progress, the same on every rank. A checkpoint has this, the shards and each rank's random state.

    The learning rate is a function of `step`; the samples' order is a function of the sampler's seed and position.
    """

    step: int = 0  # optimizer steps taken, skipped ones counted
    tokens: int = 0  # targets learned so far, all ranks
    skipped: int = 0  # steps whose loss or gradient was not finite
    repeated: int = 0  # minibatches that were run again as exact sums did not fit their scales
    sampler: dict[str, int] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> RunState:
        """Raises TypeError unless the fields are those of `as_json`."""
        return cls(**saved)


def own_gradients(parameters: Iterable[nn.Parameter], rank: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(this rank's gradients, those of them that count in the norm): replicated ones count on rank 0 only."""
    local, counted = [], []
    for parameter in parameters:
        if parameter.grad is None:
            continue
        gradient = parameter.grad
        replicated = isinstance(gradient, DTensor) and all(place.is_replicate() for place in gradient.placements)
        if isinstance(gradient, DTensor):
            gradient = gradient.to_local()
        local.append(gradient)
        if rank == 0 or not replicated:
            counted.append(gradient)
    return local, counted


def square_norm(gradients: list[torch.Tensor]) -> float:
    """Sum of squares of all elements: norms are in the gradients' dtype, their squares are summed in fp64."""
    gradients = [each for each in gradients if each.numel()]
    if not gradients:
        return 0.0
    return torch.stack(torch._foreach_norm(gradients)).double().square().sum().item()


@torch.no_grad()
def clip(gradients: list[torch.Tensor], *, norm: float, largest: float) -> None:
    """Scales gradients in place so that the whole model's `norm` is at most `largest`, as `clip_grad_norm_` does."""
    factor = largest / (norm + 1e-6)
    if factor < 1 and gradients:
        torch._foreach_mul_(gradients, factor)


def whole_norm(squares: Iterable[float]) -> float:
    """The norm from every rank's `square_norm`."""
    return math.sqrt(sum(squares))


@dataclass(frozen=True, kw_only=True)
class Told:
    """What one rank says after a minibatch."""

    loss_sum: float
    square_norm: float  # of its gradients
    waited_s: float  # since the last agreement
    passed_s: float
    stop: int | None  # the signal that asked it to stop
    save: bool  # its clock says that a checkpoint is due; rank 0's decides


@dataclass(frozen=True, kw_only=True)
class Agreed:
    """What follows from all ranks' `Told`, the same on every rank."""

    loss_sum: float
    norm: float
    idle: float  # share of the ranks' time, 0 to 1
    stop: int | None
    save: bool

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss_sum) and math.isfinite(self.norm)


def agree(engine: Engine, told: Told) -> Agreed:
    """Meets the other ranks. Raises RankLost and DeadlineExceeded."""
    messages: list[dict[str, Any]] = engine.meet(f"sum up minibatch {engine.state.number}", vars(told))
    passed_s = sum(each["passed_s"] for each in messages)
    return Agreed(
        loss_sum=sum(each["loss_sum"] for each in messages),
        norm=whole_norm(each["square_norm"] for each in messages),
        idle=min(sum(each["waited_s"] for each in messages) / passed_s, 1.0) if passed_s else 0.0,
        stop=next((each["stop"] for each in messages if each["stop"] is not None), None),
        save=messages[0]["save"],
    )


Samples = TokenizedDataset | SampleSubset
SHOWN_MINIBATCHES = 3  # in the report's timeline


class TooManySkipped(RuntimeError):
    """More steps than `max_skipped` had a loss or a gradient that is not finite."""


class SftRun:
    """Model, optimizer, samples and where it stands."""

    def __init__(
        self,
        *,
        options: SftOptions,
        model: nn.Module,
        data: Samples,
        cost: CostModel | None = None,
        identity: dict[str, Any] | None = None,
    ) -> None:
        """`model` is sharded, and packing was enabled before that. `identity`: what a run must share with this one to
        resume it, by default the options'.
        """
        self.options, self.model, self.data, self.cost = options, model, data, cost
        self.engine = engine_of(model)
        self.identity = identity or options.identity(self.engine.world)
        self.state = RunState()
        self.optimizer = make_optimizer(model, options)
        lengths = data.lengths.tolist()
        splits = options.split_sequences and self.engine.world > 1
        self.sampler = MinibatchSampler(
            lengths,
            options.samples_per_rank,
            options.token_cap,
            balance=options.balance,
            seed=options.seed,
            rank=self.engine.rank,
            world=self.engine.world,
            cost=cost,
            drop_last=True,
            counter=self._counter(),
            split=splits and (options.split_tokens or True),
        )
        if splits:
            self._enable_split(max(lengths))
        self._target_counts = data.target_counts
        epochs = 1.0 if options.epochs is None else options.epochs
        self.steps = options.steps or max(round(epochs * len(self.sampler)), 1)
        self._schedule = make_schedule(options, self.steps)
        self.stop: int | None = None  # the signal for which the ranks have agreed to stop
        self.save_is_due = False
        self.was_skipped = False  # the last step: the weights that it left unchanged may be the cause
        self.recent: deque[list[Event]] = deque(maxlen=SHOWN_MINIBATCHES)
        self._epoch = iter(self.sampler)
        self._agreed_s = time.monotonic()

    def _enable_split(self, longest: int) -> None:
        """Raises ValueError where the longest sample can't be cut."""
        sampler = self.sampler
        how = {"ranks": sampler.world, "token_cap": sampler.token_cap, "cost": sampler.cost}
        deal_split([longest], tokens=sampler.split_tokens, **how)
        enable_split(self.model, sampler.split_tokens)

    def _counter(self) -> Counter | None:
        """What the ranks of a queue share, with the run's deadline; None without a queue."""
        if self.options.balance != QUEUE or self.engine.world == 1:
            return None
        return store_counter(timeout=timedelta(minutes=self.options.timeout_minutes))

    # ------------------------------------------------------------------ a step

    def next_packs(self) -> tuple[int, Iterable[Pack], SplitPlan | None]:
        """The targets that this rank counts in the next minibatch, its packs, and the plan of their pieces. Starts a
        new epoch when one ends.

        With a queue, packs are taken during iteration, and each rank counts a part of the samples.
        """
        dealt = next(self._epoch, None)
        if dealt is None:
            self._epoch = iter(self.sampler)
            dealt = next(self._epoch)
        if isinstance(dealt, QueuedPacks):
            return int(self._target_counts[dealt.own_part()].sum()), map(self._collated, dealt), dealt.split
        packs = [self._collated(members) for members in dealt]
        return count_target_tokens(packs), packs, dealt.split

    def _collated(self, members: list[Entry]) -> Pack:
        (pack,) = pack_collate([PackedDataset(self.data)[members]])
        return pack

    def train_step(
        self,
        *,
        stop: Callable[[], int | None] = lambda: None,
        look: Callable[[], None] = lambda: None,
        save_by_clock: Callable[[], bool] = lambda: False,
    ) -> dict[str, Any]:
        """One minibatch and one optimizer step; returns metrics of all ranks together, the same on every rank.

        `stop`: the signal that asked this rank to stop; `look` is called between microbatches; `save_by_clock`:
        whether a checkpoint is due. Afterwards `self.stop` and `self.save_is_due` are what the ranks agreed on.

        Raises MinibatchFailed on all ranks for what a microbatch, or reading its samples, raised on any;
        TooManySkipped.
        """
        state = self.state
        start_s = time.monotonic()
        loss_sum, tokens = self._minibatch(look)
        gradients, counted = own_gradients(self.model.parameters(), self.engine.rank)
        events = self.engine.events.drain()
        told_s = time.monotonic()
        agreed = agree(
            self.engine,
            Told(
                loss_sum=loss_sum.item(),
                square_norm=square_norm(counted),
                waited_s=total_s(events, "wait"),
                passed_s=told_s - self._agreed_s,
                stop=stop(),
                save=save_by_clock(),
            ),
        )
        self._agreed_s = told_s
        self.recent.append(events)
        lr = self._step(agreed, gradients)
        state.step += 1
        state.tokens += tokens
        state.sampler = self.sampler.state_dict()
        self.stop, self.save_is_due = agreed.stop, agreed.save
        took_s = time.monotonic() - start_s
        metrics = {
            "step": state.step,
            "epoch": state.sampler["epoch"] + state.sampler["minibatch"] / len(self.sampler),
            "loss": agreed.loss_sum / tokens,
            "lr": lr,
            "grad_norm": agreed.norm,
            "tokens": state.tokens,
            "target_tokens_per_s": tokens / took_s,
            "idle": agreed.idle,
            "seconds": took_s,
            "skipped": state.skipped,
        }
        if self.engine.exact:
            metrics["repeated"] = state.repeated
        if state.skipped > self.options.max_skipped:
            raise TooManySkipped(
                f"step {state.step}: the loss is {metrics['loss']} and the gradient's norm {agreed.norm}; that makes "
                f"{state.skipped} skipped steps, more than --max-skipped {self.options.max_skipped}. Lower --lr, look "
                f"at the data, or continue from an older checkpoint with --resume FOLDER"
            )
        return metrics

    def _minibatch(self, look: Callable[[], None]) -> tuple[torch.Tensor, int]:
        """This rank's loss, summed over its targets, and the targets of all ranks; gradients have landed."""
        device = self.engine.heap.device
        problem: Exception | None = None
        try:
            counted, packs, split = self.next_packs()
        except Exception as error:  # raised below, where the other ranks are told
            counted, packs, split, problem = 0, [], None, error
        packs = Kept(packs) if self.engine.exact else packs

        def run() -> tuple[torch.Tensor, int]:
            loss_sum = torch.zeros((), dtype=torch.float64, device=device)
            with minibatch(self.model, tokens=counted, split=split) as mb:
                if problem is not None:
                    raise problem
                for pack in packs:
                    look()
                    loss = summed_loss(self.model, to_device(pack, device))
                    (loss / mb.tokens).backward()
                    loss_sum += loss.detach()
            return loss_sum, mb.tokens

        def repeats(error: MinibatchToRepeat) -> None:
            self.state.repeated += 1

        return repeating(run, repeats) if self.engine.exact else run()

    def _step(self, agreed: Agreed, gradients: list[torch.Tensor]) -> float:
        """Takes the optimizer's step if all is finite; returns its learning rate."""
        options = self.options
        lr = options.lr * self._schedule(self.state.step)
        if agreed.finite:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            clip(gradients, norm=agreed.norm, largest=options.clip_norm)
            self.optimizer.step()
        self.was_skipped = not agreed.finite
        self.state.skipped += self.was_skipped
        self.optimizer.zero_grad()
        return lr

    def is_sound(self) -> bool:
        """Whether the weights are worth keeping: at least one step changed them, and all are finite. Collective."""
        finite = all(bool(p.to_local().isfinite().all()) for p in self.model.parameters())
        found = self.engine.meet(f"whether the weights are finite after step {self.state.step}", {"finite": finite})
        self.rested()
        return all(each["finite"] for each in found) and self.state.skipped < self.state.step

    # ------------------------------------------------------------------ evaluation

    @torch.no_grad()
    def evaluate(self, data: Samples) -> float:
        """Mean loss over all targets of `data`: no minibatch; each rank evaluates its share, then one meeting."""
        lengths, device = data.lengths.tolist(), self.engine.heap.device
        how = {"ranks": self.engine.world, "token_cap": self.options.token_cap, "cost": self.sampler.cost}
        fit = [index for index, length in enumerate(lengths) if length <= self.options.token_cap]
        loss_sum, targets = torch.zeros((), dtype=torch.float64, device=device), 0

        def add(packs: Iterable[list[Entry]]) -> None:
            nonlocal loss_sum, targets
            for pack in packs:
                (collated,) = pack_collate([PackedDataset(data)[pack]])
                loss_sum += summed_loss(self.model, to_device(collated, device))
                targets += count_target_tokens([collated])

        self.model.eval()
        try:
            if fit:
                mine = assign([lengths[index] for index in fit], balance="mini", **how)[self.engine.rank]
                add([fit[at] for at in pack] for pack in mine)
            for index in sorted(set(range(len(lengths))) - set(fit)):  # longer ones, cut over all ranks
                deal = deal_split([lengths[index]], tokens=self.sampler.split_tokens, names=[index], **how)
                with split_forward(self.model, deal.plan):
                    add(deal.packs(self.engine.rank))
        finally:
            self.model.train()
        told = {"loss_sum": loss_sum.item(), "targets": targets}
        messages = self.engine.meet(f"evaluation after step {self.state.step}", told)
        self.rested()
        total = sum(each["loss_sum"] for each in messages)
        return total / sum(each["targets"] for each in messages) if math.isfinite(total) else math.nan

    # ------------------------------------------------------------------ what is saved

    def position(self) -> dict[str, Any]:
        """All that a checkpoint needs besides shards and random states, the same on every rank; JSON."""
        return {"state": self.state.as_json(), "identity": self.identity, "seed": self.options.seed}

    def resume(self, saved: dict[str, Any], where: Path) -> None:
        """Restores a `position` of the run in the folder `where`. Raises ValueError for another kind of run."""
        if "state" not in saved:
            raise ValueError("the checkpoint has no position of a run: it was not saved by train sft")
        require_same(saved["identity"], self.identity, where=where)
        self.state = RunState.from_json(saved["state"])
        self.sampler.load_state_dict(self.state.sampler)
        self._epoch = iter(self.sampler)

    def rested(self) -> None:
        """Excludes the time since the last step (saving a checkpoint, say) from the idle share."""
        self.engine.events.drain()
        self._agreed_s = time.monotonic()
