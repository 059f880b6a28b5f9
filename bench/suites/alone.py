"""One variant in its own job: how fast, how much memory, how idle. Nothing else is in the ranks' memory.

Idle on the CPU: the share of the ranks' time in which they do nothing useful, by their own events (`idle_fraction`). On
GPUs: the share of an additional minibatch, run under torch's profiler, in which no kernel computes: waiting, transfers
that nothing hides, and gaps between kernels.
"""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from odc_triton.balance import CostModel
from odc_triton.jobs.reports.trace import (
    ACCUMULATE,
    BARRIERS,
    GATHER,
    IDLE,
    TimeSpan,
    category_of_kernel,
    excerpt,
    idle_fraction,
    overlapping,
)

from ..device import Gpu, profiled
from ..harness import Minibatch, PeakMemory, build, gather, open_job, set_torch_up, train_minibatch
from ..provenance import gpu
from ..variants import Setting, Variant

_NO_COMPUTE = (ACCUMULATE, GATHER, BARRIERS, IDLE)


class RandomTokens:
    """Samples of the given lengths, each with its own random tokens: the same on every rank and for every variant."""

    def __init__(self, lengths: Sequence[int], vocabulary: int, seed: int) -> None:
        self.lengths, self._vocabulary, self._seed = lengths, vocabulary, seed

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + index)
        return {"input_ids": torch.randint(0, self._vocabulary, (self.lengths[index],), generator=generator)}


@dataclass(frozen=True, kw_only=True)
class LengthsWork:
    """What to train on, like `harness.Work`: random tokens of given lengths, any transformers causal LM.

    `lengths`: tokens of every sample. `minibatches`: indices of all ranks' samples, `round_size` minibatches per round,
    the first of each round to warm up. No sample is longer than `token_cap`. `drawn_on`: the device that draws random
    weights: a host takes half a minute for a billion.
    """

    model: str | None
    init: str | None
    lengths: list[int]
    minibatches: list[list[int]]
    round_size: int
    token_cap: int
    gradient_checkpointing: bool = False
    seed: int = 0
    drawn_on: str = "cpu"

    @classmethod
    def drawn(
        cls, lengths: Sequence[int], *, samples: int, rounds: int, timed: int, seed: int, **others: Any
    ) -> LengthsWork:
        """Minibatches of `samples` each, from the lengths in a random order, repeated if there are too few."""
        generator, order = random.Random(seed), []
        count = samples * rounds * (timed + 1)
        while len(order) < count:
            order += generator.sample(range(len(lengths)), len(lengths))
        taken = [lengths[index] for index in order[:count]]
        minibatches = [list(range(first, first + samples)) for first in range(0, count, samples)]
        return cls(lengths=taken, minibatches=minibatches, round_size=timed + 1, seed=seed, **others)

    def indices(self, round_: int) -> range:
        """The minibatches of a round."""
        return range(round_ * self.round_size, (round_ + 1) * self.round_size)

    @cached_property
    def config(self) -> Any:
        from odc_triton.checkpoint.adapted import read_config

        return read_config(self.init or self.model).get_text_config()

    def data(self) -> RandomTokens:
        return RandomTokens(self.lengths, self.config.vocab_size, self.seed)

    def build(self) -> nn.Module:
        from odc_triton.checkpoint import load_causal_lm

        torch.manual_seed(self.seed)
        with torch.device("cpu" if self.init is None else self.drawn_on):
            model = load_causal_lm(model=self.model, init=self.init)
        if self.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    def cost(self) -> CostModel:
        """In floating-point operations of forward and backward."""
        return CostModel.from_config(self.config)

    def tokens(self, index: int) -> int:
        return sum(self.lengths[sample] for sample in self.minibatches[index])

    def flops(self, index: int) -> float:
        """FLOPs of one minibatch's forward and backward, whatever is recomputed."""
        cost = self.cost()
        return math.fsum(cost.sequence(self.lengths[sample]) for sample in self.minibatches[index])


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One variant's turn in one round. `idle`: 0 to 1, None if not recorded. Lists: by timed minibatch.

    `peak_bytes`, by rank, beyond what was in use before the model: on the CPU of the process, with its share of shared
    memory; on a GPU of the whole device, with torch's reserve, symmetric memory and NCCL's buffers.
    """

    seconds: list[float]
    microbatches: list[list[int]]
    first_loss: float
    peak_bytes: list[int]
    idle: float | None
    parameters: int
    gpu: dict[str, str] | None = None
    waited_s: list[list[float]] = field(default_factory=list)  # for a core, by rank


def take_turn(kind: type[Variant], work: LengthsWork, setting: Setting, round_: int) -> Turn:
    """Builds the variant and trains the minibatches of one round, the first to warm up. Collective."""
    open_job(setting)
    set_torch_up()
    watch = PeakMemory()
    before = Gpu().most_used_bytes() if setting.device == "cuda" else watch.read()[0]
    data, cost = work.data(), work.cost()
    with watch:
        variant = build(kind, work, setting)
        parameters = sum(p.numel() for p in variant.model.parameters())
        ran = [
            train_minibatch(variant, work, data, cost, index, number)
            for number, index in enumerate(work.indices(round_))
        ]
        peaks = gather((Gpu().most_used_bytes() if setting.device == "cuda" else watch.peak()) - before)
    events = [event for of_rank in gather(variant.events()) for event in of_rank]
    if setting.device == "cuda":
        idle = _profiled_idle(variant, work, data, cost, work.indices(round_)[-1], len(ran))
    elif kind.records_waiting:
        idle = idle_fraction(excerpt({"": events}, minibatches=range(1, len(ran)))[""])
    else:
        idle = None
    del variant
    gc.collect()  # free the heap before its process group; nobody reads it any more since the gathering above
    gather(None)
    dist.destroy_process_group()
    return Turn(
        seconds=[each.seconds for each in ran[1:]],
        microbatches=[each.microbatches for each in ran[1:]],
        first_loss=ran[0].loss,
        peak_bytes=peaks,
        idle=idle,
        parameters=parameters,
        gpu=gpu() if setting.device == "cuda" else None,
        waited_s=[each.waited_s for each in ran[1:]],
    )


def _profiled_idle(
    variant: Variant, work: LengthsWork, data: RandomTokens, cost: CostModel, index: int, number: int
) -> float:
    """The share of the ranks' time in which their devices compute nothing, in one more minibatch."""
    ran, kernels = profiled(lambda: train_minibatch(variant, work, data, cost, index, number))
    computing = gather(computing_seconds(kernels, ran))
    return 1 - sum(computing) / (len(computing) * ran.seconds)


def computing_seconds(kernels: Sequence[tuple[str, float, float]], ran: Minibatch) -> float:
    """Seconds of a minibatch in which some kernel of (name, start_s, end_s) computed, no matter on how many streams."""
    spans = [
        TimeSpan(category_of_kernel(name, frozenset()), start_s, end_s)
        for name, start_s, end_s in kernels
        if "nccl" not in name.lower() and not name.lower().startswith("memset")
    ]
    seconds = overlapping(spans, ran.start_s, ran.end_s)
    return sum(value for category, value in seconds.items() if category not in _NO_COMPUTE)
