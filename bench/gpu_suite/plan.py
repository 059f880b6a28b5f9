"""Which stages there are, in order of worth, and how the time is shared. Pure but for the stages themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .measured import QWEN_1_5B, run_kernels, run_lengths, run_links, run_steps
from .memcheck import run_memcheck
from .outcome import Outcome
from .tests import FOUR, KILLED, TESTS, run_tests

_BF16 = ["--dtype", "bf16", "--token-cap", "8192"]


@dataclass(frozen=True, kw_only=True)
class Here:
    """What a stage is given: where results go, the environment of its processes, how many GPUs there are."""

    out: Path
    environment: dict[str, str]
    gpus: int


@dataclass(frozen=True, kw_only=True)
class Stage:
    """`weight`: its part of the time beside the other stages'. `gpus`: how many it needs."""

    name: str
    run: Callable[[Here, float], Outcome]
    weight: float
    gpus: int = 1


def _tests(here: Here, seconds: float) -> Outcome:
    return run_tests(list(TESTS), "gpu", here.environment, seconds, without=(FOUR, KILLED))


def _lengths(here: Here, seconds: float) -> Outcome:
    given = [*_BF16, "--device", "cuda", "--rounds", "2", "--minibatches", "3"]
    return run_lengths(QWEN_1_5B, given, here.environment, seconds, ranks=here.gpus, longest=8192)


def _links(here: Here, seconds: float) -> Outcome:
    return run_links([], here.environment, seconds)


def _kernels(here: Here, seconds: float) -> Outcome:
    return run_kernels(here.out, here.environment, seconds)


def _step(here: Here, seconds: float) -> Outcome:
    return run_steps(QWEN_1_5B, [*_BF16, "--samples-per-rank", "2"], here.environment, seconds)


def _killed(here: Here, seconds: float) -> Outcome:
    return run_tests([KILLED], "gpu", here.environment, seconds, stage="killed")


def _four(here: Here, seconds: float) -> Outcome:
    return run_tests([FOUR], "gpu", here.environment, seconds, stage="four")


def _memcheck(here: Here, seconds: float) -> Outcome:
    return run_memcheck(here.environment, seconds)


STAGES = (
    Stage(name="tests", run=_tests, weight=4.0),
    Stage(name="lengths", run=_lengths, weight=5.0, gpus=2),
    Stage(name="links", run=_links, weight=1.0, gpus=2),
    Stage(name="kernels", run=_kernels, weight=2.0),
    Stage(name="step", run=_step, weight=1.5),
    Stage(name="killed", run=_killed, weight=0.7),
    Stage(name="four", run=_four, weight=1.3),
    Stage(name="memcheck", run=_memcheck, weight=1.0),
)


def stages_here(names: Sequence[str], gpus: int) -> tuple[list[Stage], list[str]]:
    """The stages of those names that this many GPUs allow, in order of worth, and the names of the others."""
    wanted = [stage for stage in STAGES if stage.name in names]
    return [s for s in wanted if s.gpus <= gpus], [s.name for s in wanted if s.gpus > gpus]


def seconds_for(stages: Sequence[Stage], left_s: float) -> float:
    """What the first of the remaining stages may take of the time that is left: all of it, if it is the last."""
    return left_s * stages[0].weight / sum(stage.weight for stage in stages)
