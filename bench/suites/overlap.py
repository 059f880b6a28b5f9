"""Overlapped rollouts compared with phases: seconds of a step, and the least that overlapping could take.

    out/vllm/bin/python -m bench.suites.overlap server [--steps 20] [--out FILE]
    python -m bench.suites.overlap ranks [--steps 20] [--out FILE]

`train grpo` takes every step in each way, in turns, on the same prompts and lengths (bench/rollouts.py), which are
forced. Bounds are counted from the steps in phases alone: see `least_s`. The first step is not counted.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from odc_triton.jobs.launcher.launch import launch
from odc_triton.jobs.reports.report import table
from odc_triton.jobs.rl.rollout import PromptSlot
from odc_triton.jobs.train import grpo
from odc_triton.jobs.train.grpo_options import GrpoOptions
from odc_triton.jobs.train.grpo_run import GrpoRun
from odc_triton.jobs.train.metrics import Metrics
from odc_triton.jobs.vllm.policy_server import PolicyServer
from odc_triton.step import Objective, StepReport
from tests.support.vllm_real import vllm_serve, write_vllm_case

from .. import quiet, rollouts
from ..harness import in_turn, median_ratio, single_thread_environment
from ..provenance import about, save_parts

PHASES, OVERLAPPED, BOTH_CORES = "phases", "overlapped", "phases, both cores"
SEED, TOKEN_CAP = 0, 4096
REWARD = "bench.sorting:random_reward"  # so that all groups are learned
LONGEST = 320  # tokens of a prompt and its completion
# Few and wide layers: updates get longer with the width, and steps of vLLM with the number. So phases are about alike.
MODEL = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 18, "num_key_value_heads": 9}
MODEL |= {"num_hidden_layers": 2, "max_position_embeddings": LONGEST}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """`decode_at_once`: with which phases are fastest."""

    about: str
    ways: tuple[str, ...]
    ranks: int
    decode_at_once: int


SERVER = Setting(
    about=(
        "One rank that trains, with its reward process, on one core; vLLM, with all its threads, on another. A core "
        "stands for a device with one role: the other role does not use it, in phases either, where it is idle for "
        "half of a step. In phases with both cores each role has both in its phase: torch has two threads, and vLLM is "
        "another server."
    ),
    ways=(PHASES, OVERLAPPED, BOTH_CORES),
    ranks=1,
    decode_at_once=rollouts.PROMPTS * rollouts.GENERATIONS,
)
RANKS = Setting(
    about="Two ranks, each on its own core. Both sample, with transformers, and train.",
    ways=(PHASES, OVERLAPPED),
    ranks=2,
    decode_at_once=16,
)
SETTINGS = {"server": SERVER, "ranks": RANKS}


# ---------------------------------------------------------------------- a step in each way


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One rank's step in one way. Seconds; those of `came_s` and `sampled_s` are from the rollout's start."""

    way: str
    metrics: Metrics
    came_s: dict[int, float]  # by place of a prompt: when this rank had its completions
    sampled_s: float  # until this rank had sampled and scored its last one
    scoring_s: float
    computed_s: float  # packs, without what it waited for in them
    waited_s: float  # for a core
    costs: list[float]  # of groups


class Timed:
    """A step's packs, and when each was computed."""

    def __init__(self, packs: Any, spans_s: list[tuple[float, float]]) -> None:
        self._packs, self._spans_s = packs, spans_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._packs, name)

    def __iter__(self) -> Iterator:
        for pack in self._packs:
            start_s = time.monotonic()
            yield pack
            self._spans_s.append((start_s, time.monotonic()))


class Turns(GrpoRun):
    """Each step in every one of `ways`. `servers`: by way; `kept` gets what is measured."""

    def __init__(self, *, ways: Sequence[str], servers: dict[str, str], kept: list[Turn], **how: Any) -> None:
        super().__init__(**how)
        self._ways, self._kept, self._overlap = ways, kept, self.overlapped
        self._servers = {way: PolicyServer(address) for way, address in servers.items()}
        self._cores = sorted(os.sched_getaffinity(0))[:2]

    def train_step(self) -> Metrics | None:
        self._turn, place = divmod(self.state.step, len(self._ways))
        way = in_turn(self._ways, self._turn)[place]
        self.overlapped = self._overlap if way == OVERLAPPED else None
        use_cores(self._cores if way == BOTH_CORES else [self._cores[self.engine.rank]])
        if self._servers:
            self.sampler.completions.turn_to(self._servers[way])
        self._packs_s: list[tuple[float, float]] = []
        waited_s = quiet.waited_s()
        metrics = super().train_step()
        if metrics is not None:
            self._kept.append(self._measured(way, metrics, quiet.waited_s() - waited_s))
            if self.engine.rank == 0:
                print(f"  step {self._turn}, {way}: {metrics['seconds']:.2f} s", flush=True)
        return metrics

    def _slots(self) -> list[PromptSlot]:
        step, self.state.step = self.state.step, self._turn
        self._made_slots = super()._slots()
        self.state.step, self._start_s = step, time.monotonic()
        return self._made_slots

    def step(self, plan: Any, objective: Objective, **how: Any) -> StepReport:
        return super().step(Timed(plan, self._packs_s), objective, **how)

    def _measured(self, way: str, metrics: Metrics, waited_s: float) -> Turn:
        start_s, engine, events = self._start_s, self.sampler.completions, self.recent[-1]
        own = {place: slot.seeds for place, slot in enumerate(self._made_slots) if slot.seeds[0] in engine.came_s}
        came_s = {place: max(engine.came_s[seed] for seed in seeds) - start_s for place, seeds in own.items()}
        engine.came_s.clear()
        rolled = [event for event in events if event.kind in ("rollout", "scoring")]
        waits = [event for event in events if event.kind == "wait"]
        within_s = sum(e.end_s - e.start_s for e in waits if any(a <= e.start_s < b for a, b in self._packs_s))
        return Turn(
            way=way,
            metrics=metrics,
            came_s=came_s,
            sampled_s=max((event.end_s - start_s for event in rolled), default=0.0),
            scoring_s=sum(event.end_s - event.start_s for event in rolled if event.kind == "scoring"),
            computed_s=sum(b - a for a, b in self._packs_s) - within_s,
            waited_s=waited_s,
            costs=[self._cost(slot) for slot in self._made_slots],
        )

    def _cost(self, slot: PromptSlot) -> float:
        """Of a group, as `OverlappedRollout` counts it."""
        cost, prompt = self.cost, len(slot.prompt.ids)
        shared = prompt - 1 if self.shares_prefixes else 0
        lengths = [prompt + self.sampler.completions.lengths[seed] for seed in slot.seeds]
        return cost.sequence(shared) + math.fsum(cost.segment(shared, each) for each in lengths)


def use_cores(cores: Sequence[int]) -> None:
    """All threads of this process run on these, and torch uses as many."""
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread), cores)
    torch.set_num_threads(len(cores))


def train(options: GrpoOptions, ways: Sequence[str], servers: dict[str, str], steps: list[rollouts.Step]) -> list[Turn]:
    """One rank of the job."""
    kept: list[Turn] = []
    lengths = rollouts.by_seed(steps, options.seed)
    grpo.GrpoRun = partial(Turns, ways=ways, servers=servers, kept=kept)
    grpo.VllmServer = partial(rollouts.ForcedServer, lengths=lengths)
    grpo.TransformersEngine = partial(rollouts.ForcedEngine, lengths=lengths)
    grpo.run_grpo(options)
    return kept


# ---------------------------------------------------------------------- results


def least_s(work: Sequence[tuple[float, float]], sampling_s: Sequence[float]) -> float:
    """The least seconds of rollout and update together.

    `work`: for each group of completions (seconds from the rollout's start until it was sampled, seconds to compute
    it). `sampling_s`: for each rank that computes, how long it samples itself. Nothing is computed before it was
    sampled, and no rank does two things at once; all else is assumed to be ideal.
    """
    ranks, total_s = len(sampling_s), math.fsum(seconds for _, seconds in work)
    after_s = [at_s + math.fsum(s for other_s, s in work if other_s >= at_s) / ranks for at_s, _ in work]
    return max((math.fsum(sampling_s) + total_s) / ranks, *sampling_s, *after_s)


def least_step_s(turn: Sequence[Turn], samples_elsewhere: bool) -> float:
    """The least seconds of an overlapped step. `turn`: of each rank, in phases."""
    came_s = {place: at_s for rank in turn for place, at_s in rank.came_s.items()}
    computed_s = [rank.computed_s for rank in turn]
    to_do_s, sampling_s = sum(computed_s), [rank.sampled_s for rank in turn]
    if samples_elsewhere:  # the only rank's own part of a rollout is scoring
        to_do_s, sampling_s = to_do_s + turn[0].scoring_s, [0.0]
    other_s = turn[0].metrics["seconds"] - max(rank.sampled_s for rank in turn) - max(computed_s)
    costs = turn[0].costs
    work = [(came_s[place], to_do_s * cost / math.fsum(costs)) for place, cost in enumerate(costs)]
    return other_s + least_s(work, sampling_s)


def summary(setting: Setting, by_rank: Sequence[Sequence[Turn]]) -> dict[str, Any]:
    """The first step is left out. Ratios are phases over overlapped, by step; `of_bound`: this over its bound."""
    turns: dict[str, list[tuple[Turn, ...]]] = {way: [] for way in setting.ways}
    for turn in zip(*by_rank, strict=True):
        turns[turn[0].way].append(turn)
    turns = {way: each[1:] for way, each in turns.items()}
    seconds = {way: [turn[0].metrics["seconds"] for turn in each] for way, each in turns.items()}
    least = [least_step_s(turn, setting.ranks == 1) for turn in turns[PHASES]]
    overlapped = seconds[OVERLAPPED]
    found = {
        "about": setting.about,
        "steps": len(least),
        "ways": {way: {"median_s": statistics.median(seconds[way])} | _medians(of) for way, of in turns.items()},
        "ratio": median_ratio(seconds[PHASES], overlapped),
        "bound": median_ratio(seconds[PHASES], least),
        "of_bound": median_ratio(least, overlapped),
        "least_s": least,
        "seconds": seconds,
        "came_s": [sorted(at_s for rank in turn for at_s in rank.came_s.values()) for turn in turns[PHASES]],
        "disturbed": sum(
            quiet.is_disturbed(of_step, [rank.waited_s for rank in turn])
            for of_step, turn in zip(seconds[PHASES], turns[PHASES], strict=True)
        ),
    }
    if BOTH_CORES in seconds:
        found["both_cores_ratio"] = median_ratio(seconds[BOTH_CORES], overlapped)
    return found


def _medians(turns: Sequence[Sequence[Turn]]) -> dict[str, float]:
    """Of a way, by what a step's seconds are for; those of ranks are means over ranks."""
    of_ranks = {
        name: statistics.median(statistics.mean(getattr(rank, name) for rank in turn) for turn in turns)
        for name in ("sampled_s", "scoring_s", "computed_s", "waited_s")
    }
    names = ("sync_s", "rollout_s", "update_s", "hidden_s", "idle")
    metrics = [turn[0].metrics for turn in turns]
    return of_ranks | {name: statistics.median(each.get(name, 0.0) for each in metrics) for name in names}


# ---------------------------------------------------------------------- the command


def options_of(folder: Path, setting: Setting, steps: int, prompts: int, address: str | None) -> GrpoOptions:
    return GrpoOptions(
        data=str(folder / "data.jsonl"),
        model=str(folder / "start"),
        out=str(folder / "out"),
        reward=(REWARD,),
        overlap_rollout="on",
        steps=(steps + 1) * len(setting.ways),
        prompts_per_rank=prompts // setting.ranks,
        generations=rollouts.GENERATIONS,
        max_new_tokens=rollouts.LONGEST,
        decode_at_once=setting.decode_at_once,
        token_cap=TOKEN_CAP,
        lr=1e-9,  # the policy stays as it is
        seed=SEED,
        engine="transformers" if address is None else "vllm-server",
        vllm_server=address,
    )


@contextlib.contextmanager
def serving(folder: Path, cores: Sequence[int], threads: int) -> Iterator[str]:
    """The address of a vLLM server that has these cores, and computes with so many threads."""
    before, requests = os.sched_getaffinity(0), rollouts.PROMPTS * rollouts.GENERATIONS
    more = ["--max-model-len", str(LONGEST), "--max-num-seqs", str(requests)]
    more += ["--max-num-batched-tokens", str(requests * LONGEST)]  # on CPUs vLLM fails at a part of a seeded prompt
    try:
        os.sched_setaffinity(0, cores)
        with vllm_serve(folder / "start", folder / f"{len(cores)}.log", *more, OMP_NUM_THREADS=f"{threads}") as one:
            os.sched_setaffinity(0, before)
            yield one.address
    finally:
        os.sched_setaffinity(0, before)


def measure(setting: Setting, steps: int, prompts: int, threads: int) -> dict[str, Any]:
    cores, drawn = sorted(os.sched_getaffinity(0))[:2], [step[:prompts] for step in rollouts.read()]
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = write_vllm_case(Path(name), **MODEL)
        servers: dict[str, str] = {}
        if BOTH_CORES in setting.ways:
            one = stack.enter_context(serving(folder, cores[1:], 1))
            both = stack.enter_context(serving(folder, cores, threads))
            servers = {PHASES: one, OVERLAPPED: one, BOTH_CORES: both}
        options = options_of(folder, setting, steps, prompts, servers.get(PHASES))
        return summary(setting, launch(train, options, setting.ways, servers, drawn, ranks=setting.ranks))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("setting", choices=SETTINGS)
    parser.add_argument("--steps", type=int, default=2, help=f"that count, at most {rollouts.STEPS - 1}")
    parser.add_argument("--prompts", type=int, default=rollouts.PROMPTS, help=f"of a step, at most {rollouts.PROMPTS}")
    parser.add_argument("--decode", type=int, default=0, help="completions that a rank decodes together; else the best")
    parser.add_argument("--threads", type=int, default=1, help="of vLLM with both cores, without its other processes")
    parser.add_argument("--out", type=Path, default=None, help="JSON file, whose other keys stay")
    options = parser.parse_args(arguments)
    single_thread_environment()
    start_s, setting = time.monotonic(), SETTINGS[options.setting]
    setting = replace(setting, decode_at_once=options.decode or setting.decode_at_once)
    found = measure(setting, options.steps, options.prompts, options.threads)
    numbers = " ".join(f"--{name} {getattr(options, name)}" for name in ("steps", "prompts", "decode", "threads"))
    command = f"python -m bench.suites.overlap {options.setting} {numbers}"
    found |= {"command": command, "took_s": time.monotonic() - start_s, **about()}
    if options.out is not None:
        save_parts(options.out, **{options.setting: found})
    rows = [[way, *(f"{seconds:.3f}" for seconds in each.values())] for way, each in found["ways"].items()]
    print(table(rows, ("", *next(iter(found["ways"].values())))))
    for name in ("ratio", "bound", "of_bound", "both_cores_ratio"):
        if name in found:
            print("{}: {ratio:.3f} ({low:.3f} to {high:.3f})".format(name, **found[name]))
    print(f"disturbed: {found['disturbed']} of {found['steps']} steps in phases; {found['took_s']:.0f} s")


if __name__ == "__main__":
    main()
