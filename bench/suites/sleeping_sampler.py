"""Rollouts in which ranks sleep for as long as sampling and computing would take, on the real engine with real ranks.

Sampler, overlapped rollout, assignment, minibatches, store and queue are the library's. A prompt's completions take as
long to sample as the longest, and to compute as the cost model says. Rewards are made in the ranks' own processes.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from odc_triton.balance import CostModel
from odc_triton.balance.assigner import Assigner
from odc_triton.balance.counter import store_counter
from odc_triton.balance.pieces import Entry, Piece, SplitPlan
from odc_triton.balance.relatives import find_relatives
from odc_triton.engine.api import engine_of, minibatch
from odc_triton.rl.generation import Request, Sampled, SamplingOptions
from odc_triton.rl.learned import Learned
from odc_triton.rl.objective import LearningRule
from odc_triton.rl.overlap import OverlappedRollout
from odc_triton.rl.prompts import Prompt, completion_seed
from odc_triton.rl.rollout import PromptSlot, Sampler
from odc_triton.sharding.shard import fully_shard

from .. import quiet
from ..harness import in_turn, open_job
from .sleeping import WIDTH, Gate, Sleeper, SleepingModel, spans_of

# Fixed before anything was measured. Each token stands for 64, so that messages are small.
OF_ONE = 64
MEDIAN, SIGMA, LONGEST, PROMPT = 2048 // OF_ONE, 1.0, 16384 // OF_ONE, 2560 // OF_ONE
PROMPTS, GENERATIONS, TOGETHER = 4, 8, 2  # prompts of a rank, and of these those that it samples together
TOKEN_CAP = 32768 // OF_ONE
COST = CostModel(quadratic=CostModel.paper_7b().quadratic * OF_ONE**2, linear=CostModel.paper_7b().linear * OF_ONE)
LAYERS = 2
STEP_S = 2.2  # of a rank, sampling and computing
OVERLAPPED, PHASED = "overlapped", "phased"
EMPTY_STEPS = 20


def group_cost(group: Iterable[int]) -> float:
    """Of a prompt with its completions of so many tokens."""
    return COST.sequence(PROMPT) + sum(COST.piece(PROMPT, PROMPT + tokens) for tokens in group)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """`lengths`: tokens of each completion, [step][slot][generation]."""

    ranks: int
    ratio: float
    lengths: list[list[list[int]]]
    step_s: float = STEP_S

    @classmethod
    def draw(cls, ranks: int, ratio: float, steps: int, step_s: float = STEP_S) -> Cell:
        numbers = random.Random(ranks)

        def group() -> list[int]:
            return [max(1, min(round(MEDIAN * numbers.lognormvariate(0, SIGMA)), LONGEST)) for _ in range(GENERATIONS)]

        return cls(
            ranks=ranks,
            ratio=ratio,
            step_s=step_s,
            lengths=[[group() for _ in range(PROMPTS * ranks)] for _ in range(steps)],
        )

    @cached_property
    def seconds_per_token(self) -> float:
        """Of sampling."""
        batches = [max(chain(*of[at : at + TOGETHER])) for of in self.lengths for at in range(0, len(of), TOGETHER)]
        return self.step_s * self.ratio / (1 + self.ratio) * self.ranks * len(self.lengths) / sum(batches)

    @cached_property
    def seconds_per_cost(self) -> float:
        total = sum(map(group_cost, chain(*self.lengths)))
        return self.step_s / (1 + self.ratio) * self.ranks * len(self.lengths) / total

    def pack_s(self, sizes: Iterable[int | Piece]) -> float:
        """Seconds of one microbatch."""
        ends = [(each.start, each.stop) if isinstance(each, Piece) else (0, each) for each in sizes]
        return self.seconds_per_cost * math.fsum(COST.piece(*each) for each in ends)

    def slots(self, step: int) -> list[PromptSlot]:
        """Prompts that share no token."""
        return [
            PromptSlot(
                prompt=Prompt(ids=[place] * PROMPT, given=f"{place}", columns={}),
                seeds=[completion_seed(0, step, place, number) for number in range(GENERATIONS)],
            )
            for place in range(len(self.lengths[step]))
        ]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Prompts that a rank sampled together; `slots`: their places."""

    start_s: float
    end_s: float
    slots: list[int]


@dataclass(kw_only=True)
class SleepingCompletions:
    """A completion engine of forced lengths, `lengths` by seed, that sleeps for the longest of each batch."""

    samples_elsewhere = samples_remotely = False

    sleeper: Sleeper
    seconds_per_token: float = 0.0
    lengths: Mapping[int, int] = field(default_factory=dict)
    batches: list[Batch] = field(default_factory=list)

    def generate(self, requests: Sequence[Request], options: SamplingOptions) -> list[list[Sampled]]:
        start_s = time.monotonic()
        groups = [[self.lengths[seed] for seed in request.seeds] for request in requests]
        self.sleeper.sleep(self.seconds_per_token * max(chain(*groups)))
        slots = [request.ids[0] for request in requests]
        self.batches.append(Batch(start_s=start_s, end_s=time.monotonic(), slots=slots))
        return [
            [Sampled(ids=[number] * tokens, logps=[0.0] * tokens, ended=True) for number, tokens in enumerate(group)]
            for group in groups
        ]


class OwnRewards:
    """Rewards as `Sampler` uses them, without a process: the place in the group, so all completions are learned."""

    def check(self) -> None: ...

    def score(self, prompts: Sequence, completions: Sequence, ids: Sequence[Sequence[int]], columns: Any) -> list:
        return [[float(each[0]) for each in ids]]

    def total(self, scores: Sequence[list[float]]) -> list[float]:
        return scores[0]


class NoTokenizer:
    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return ""


@dataclass(frozen=True, kw_only=True)
class Ran:
    """One step of one way on one rank; times are from the machine's monotonic clock, which ranks share."""

    start_s: float
    end_s: float
    batches: list[Batch]
    computed_s: list[float]  # of each pack
    waited_s: float  # for a core


class Job:
    """What a rank needs for the steps of any cell. Collective."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.x = torch.ones(1, WIDTH, requires_grad=True)
        self.model = fully_shard(SleepingModel(LAYERS), backend="cpu")
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        readable = PROMPT + min(LONGEST, PROMPT // 2)  # as `GrpoRun` has it for these numbers
        self.exchange = self.model.enable_split(readable)
        self.completions = SleepingCompletions(sleeper=self.model.sleeper)
        engine = engine_of(self.model)
        self.sampler = Sampler(
            engine,
            completions=self.completions,
            rewards=OwnRewards(),
            counter=store_counter(),
            tokenizer=NoTokenizer(),
            columns=(),
        )
        self.assigner = Assigner(
            rank=engine.rank,
            world=engine.world,
            balance="mini",
            token_cap=TOKEN_CAP,
            cost=COST,
            shared_tokens=readable,
        )
        self.overlapped = OverlappedRollout(self.sampler, self.assigner, shares_prefixes=True, scale="group")
        engine.register(self.overlapped)
        self.rule = LearningRule(
            loss="dapo",
            rows=PROMPTS * engine.world * GENERATIONS,
            most_tokens=LONGEST,
            mask_truncated=False,
            keep_all=False,
        )
        self.sampling = SamplingOptions(temperature=1.0, max_new_tokens=LONGEST, end_tokens=(0,))
        self.limits: dict[str, Any] = {"decode": TOGETHER * GENERATIONS, "stop": lambda: None}

    def prepare(self, cell: Cell, step: int) -> list[PromptSlot]:
        """The prompts of that step, whose completions will be as long as it says."""
        slots = cell.slots(step)
        seeds = chain.from_iterable(slot.seeds for slot in slots)
        self.completions.lengths = dict(zip(seeds, chain(*cell.lengths[step]), strict=True))
        self.completions.seconds_per_token = cell.seconds_per_token
        self.completions.batches, self.model.sleeper.owed_s = [], 0.0
        return slots

    def phased(self, cell: Cell, slots: list[PromptSlot]) -> list[float]:
        """Seconds of each of this rank's packs, as `overlapping`."""
        made = self.sampler.roll_out(slots, self.sampling, **self.limits)
        batch = Learned.of(made, self.rule, "group")
        numbers, samples = [*batch.samples], [*batch.samples.values()]
        own = self.assigner.own([*map(batch.length, numbers)], numbers, find_relatives(samples))
        return self._compute(cell, batch, own, own.split)

    def overlapping(self, cell: Cell, slots: list[PromptSlot]) -> list[float]:
        batch = Learned(rule=self.rule)
        self.overlapped.open(slots, self.sampling, batch, **self.limits)
        return self._compute(cell, batch, self.overlapped, None)

    def _compute(
        self, cell: Cell, batch: Learned, packs: Iterable[list[Entry]], split: SplitPlan | None
    ) -> list[float]:
        computed_s = []
        with minibatch(self.model, split=split) as mb:
            for entries in packs:
                start_s = time.monotonic()
                sizes = [each if isinstance(each, Piece) else batch.length(each) for each in entries]
                self.model(self.x, cell.pack_s(sizes), spans_of(self.exchange, sizes)).sum().backward()
                computed_s.append(time.monotonic() - start_s)
            mb.divide_by(batch.divisor)
        self.optimizer.step()
        return computed_s

    def empty(self) -> None:
        """A step without prompts."""
        with minibatch(self.model):
            pass
        self.optimizer.step()


def run_cells(cells: Sequence[Cell], name: str) -> tuple[list[dict[str, list[Ran]]], float]:
    """What a rank of the job does: all steps of all cells by every way in turn. By cell and way its steps; and the
    median seconds of an empty one. Collective.

    `name`: as for `Gate`.
    """
    gate, job = Gate(name), Job()
    ways = {OVERLAPPED: job.overlapping, PHASED: job.phased}

    def run(cell: Cell, step: int, way: str) -> Ran:
        slots = job.prepare(cell, step)
        gate.wait()
        start_s, waited_s = time.monotonic(), quiet.waited_s()
        computed_s = ways[way](cell, slots)
        return Ran(
            start_s=start_s,
            end_s=time.monotonic(),
            batches=job.completions.batches,
            computed_s=computed_s,
            waited_s=quiet.waited_s() - waited_s,
        )

    for way in ways:
        run(cells[0], 0, way)  # the first of a job allocates
    empty_s = []
    for _ in range(EMPTY_STEPS):
        gate.wait()
        start_s = time.monotonic()
        job.empty()
        empty_s.append(time.monotonic() - start_s)
    found: list[dict[str, list[Ran]]] = []
    for cell in cells:
        found.append({way: [] for way in ways})
        for step in range(len(cell.lengths)):
            for way in in_turn([*ways], step):
                found[-1][way].append(run(cell, step, way))
    gate.close()
    return found, statistics.median(empty_s)


def main_of_rank(cells: Sequence[Cell], name: str) -> tuple[list[dict[str, list[Ran]]], float]:
    """`run_cells` in a process that the launcher started."""
    open_job()
    try:
        return run_cells(cells, name)
    finally:
        dist.destroy_process_group()
