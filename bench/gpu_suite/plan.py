"""What every stage runs, on a GPU and in a rehearsal, side by side; and how the time is shared."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from . import measured
from .checks import run_checks
from .ledger import Ledger
from .measured import Runs, Training
from .tests import run_tests

QWEN_1_5B = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
TINY_QWEN = QWEN_1_5B | {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
# 100 steps take seconds on a GPU.
TRAINED = QWEN_1_5B | {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
REPLACED = ("--replace-layers", "--fused-head")
_STAGED = ("--operator", "linear staged", "linear_dx staged")


@dataclass(frozen=True, kw_only=True)
class Tests:
    files: tuple[str, ...]
    marker: str = "gpu"
    workers: int = 1
    words: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Given:
    """`tests`, by stage; `checked`: rows of bench.run's options; `step`: processes, and how the model is changed."""

    tests: dict[str, Tests]
    training: Training
    timed: tuple[str, ...]
    checked: dict[str, tuple[str, ...]]
    model: dict[str, Any]
    step: dict[str, tuple[int, tuple[str, ...]]]
    step_words: tuple[str, ...]
    links_words: tuple[str, ...]
    lengths_words: tuple[str, ...]
    longest: int


ON_A_GPU = Given(
    tests={
        "checks": Tests(files=("tests/gpu/test_cuda_heap.py",), workers=0, words=("-x",)),
        # In order of worth, as below.
        "kernels-right": Tests(
            files=(
                "tests/kernels/test_gather_scatter.py",
                "tests/kernels/test_matrix.py",
                "tests/kernels/test_staged.py",
                "tests/kernels/test_engine_step.py",
                "tests/kernels/test_embedding.py",
                "tests/kernels/test_linear_cross_entropy.py",
                "tests/kernels/test_qkv.py",
                "tests/kernels/test_addresses.py",
                "tests/kernels/test_refusals.py",
                "tests/kernels/test_staged_refusals.py",
                "tests/kernels/test_embedding_refusals.py",
                "tests/kernels/test_linear_cross_entropy_refusals.py",
                "tests/kernels/test_qkv_refusals.py",
            ),
            workers=min(16, os.cpu_count() or 1),
        ),
        # Two at a time: starting processes takes longer than what they then compute.
        "engine": Tests(
            files=(
                "tests/gpu/test_cuda_engine.py",
                "tests/engine/test_gathered.py",
                "tests/gpu/test_cuda_steady.py",
                "tests/hf/test_attention.py",
                "tests/engine/test_gathered_usage.py",
                "tests/engine/test_foreach.py",
                "tests/balance/test_collate.py",
            ),
            workers=2,
        ),
        "four": Tests(files=("tests/gpu/test_four_processes.py",)),
        "killed": Tests(files=("tests/gpu/test_killed.py",)),
    },
    training=Training(
        modules="",
        records=3000,
        config=TRAINED,
        samples=16,
        words=(*("--steps", "100", "--lr", "1e-3", "--token-cap", "2048", "--truncate"), *("--dtype", "bf16")),
        runs={"1 process": (1, ()), "2 processes": (2, ()), "2 processes, replaced layers": (2, REPLACED)},
    ),
    timed=(),
    checked={
        "4,096 tokens, world 8": (*_STAGED, "--model", "llama-3-8b", "--tokens", "4096", "--world", "8"),
        "ragged: 4,095 tokens, world 7": (*_STAGED, "--model", "llama-3-8b", "--tokens", "4095", "--world", "7"),
    },
    model=QWEN_1_5B,
    step={
        "1 rank": (1, ()),
        "1 rank, replaced layers": (1, REPLACED),
        "2 ranks": (2, ()),
        "2 ranks, replaced layers": (2, REPLACED),
    },
    step_words=("--dtype", "bf16", "--token-cap", "8192", "--samples-per-rank", "2"),
    links_words=(),
    lengths_words=(
        *("--dtype", "bf16", "--token-cap", "8192", "--device", "cuda"),
        *("--rounds", "2", "--minibatches", "3"),
    ),
    longest=8192,
)

_ON_THE_CPU = "not gpu and not slow"
REHEARSAL = Given(
    tests={
        "checks": Tests(files=("tests/comm/test_layout.py",), marker=_ON_THE_CPU, workers=0, words=("-x",)),
        "kernels-right": Tests(
            files=("tests/kernels/test_gather_scatter.py",), marker=_ON_THE_CPU, workers=2, words=("-k", "float32")
        ),
        "engine": Tests(
            files=("tests/engine/test_foreach.py", "tests/balance/test_collate.py"), marker=_ON_THE_CPU, workers=2
        ),
        "four": Tests(files=("tests/comm/test_heap.py",), marker=_ON_THE_CPU),
        "killed": Tests(files=("tests/faults/test_faults.py",), marker=_ON_THE_CPU, words=("-k", "test_killed")),
    },
    training=Training(
        modules="email",
        records=200,
        config=TINY_QWEN | {"vocab_size": 512, "max_position_embeddings": 256},
        samples=4,
        words=("--steps", "100", "--lr", "1e-2", "--token-cap", "128", "--truncate"),
        runs={"1 process": (1, ()), "2 processes": (2, ())},
    ),
    timed=("--rehearse", "--world", "2", "--tokens", "3"),
    checked={"tiny": (*_STAGED, "--tokens", "5", "--world", "2")},
    model=TINY_QWEN,
    step={"1 rank": (1, ()), "2 ranks, replaced layers": (2, REPLACED)},
    step_words=("--token-cap", "32", "--samples-per-rank", "1", "--minibatches", "1"),
    links_words=("--backend", "cpu-apart", "--rows", "32", "--columns", "32", "--tokens", "16"),
    lengths_words=(
        *("--device", "cpu", "--rounds", "1", "--minibatches", "1", "--samples-per-rank", "1"),
        *("--variants", "ODC + LB-Mini"),
    ),
    longest=64,
)


@dataclass(frozen=True, kw_only=True)
class Here:
    """What a stage is given. `gpus`: how many there are, or as many as a rehearsal acts as if there were."""

    ledger: Ledger
    given: Given
    environment: dict[str, str]
    gpus: int
    again: bool = False

    @property
    def rehearses(self) -> bool:
        return self.given is not ON_A_GPU

    def tests(self, stage: str, seconds: float) -> dict[str, Any]:
        tests = self.given.tests[stage]
        how = {"marker": tests.marker, "workers": tests.workers, "words": tests.words, "again": self.again}
        return run_tests(self.ledger, stage, tests.files, self.environment, seconds, **how)

    def runs(self, stage: str, seconds: float) -> Runs:
        deadline_s = time.monotonic() + seconds
        where = {"ledger": self.ledger, "environment": self.environment, "again": self.again}
        return Runs(stage=stage, deadline_s=deadline_s, **where)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """`run`: returns whether it passed, and whether the clock alone is why it did not. `seconds`: its share of the
    time. `first`: of the first half hour. `gpus`: how many it needs.
    """

    name: str
    seconds: int
    run: Callable[[Here, str, float], dict[str, Any]]
    first: bool = False
    gpus: int = 1


def _checks(here: Here, stage: str, seconds: float) -> dict[str, Any]:
    deadline_s = time.monotonic() + seconds
    right = run_checks(here.ledger, here.environment, rehearse=here.rehearses, deadline_s=deadline_s)
    ending = here.tests(stage, max(deadline_s - time.monotonic(), 1))
    return {"passed": right and ending["passed"], "cut": right and ending["cut"]}


def _tests(here: Here, stage: str, seconds: float) -> dict[str, Any]:
    return here.tests(stage, seconds)


def _train(here: Here, stage: str, seconds: float) -> dict[str, Any]:
    return measured.run_train(here.runs(stage, seconds), here.given.training)


def _kernels(here: Here, stage: str, seconds: float) -> dict[str, Any]:
    return measured.run_kernels(here.runs(stage, seconds), here.ledger.folder, here.given.timed)


def _staged(here: Here, stage: str, seconds: float) -> dict[str, Any]:
    return measured.run_checked(here.runs(stage, seconds), here.given.checked)


def _step(here: Here, stage: str, seconds: float) -> dict[str, Any]:
    given = here.given
    return measured.run_steps(here.runs(stage, seconds), given.model, given.step_words, given.step)


def _memcheck(here: Here, stage: str, seconds: float) -> dict[str, Any]:
    return measured.run_memcheck(here.runs(stage, seconds))


def _links(here: Here, stage: str, seconds: float) -> dict[str, Any]:
    return measured.run_links(here.runs(stage, seconds), here.given.links_words)


def _lengths(here: Here, stage: str, seconds: float) -> dict[str, Any]:
    given, sizes = here.given, {"ranks": here.gpus, "longest": here.given.longest}
    return measured.run_lengths(here.runs(stage, seconds), given.model, given.lengths_words, **sizes)


STAGES = (
    Stage(name="checks", seconds=120, run=_checks, first=True),
    Stage(name="kernels-right", seconds=480, run=_tests, first=True),
    Stage(name="engine", seconds=360, run=_tests, first=True),
    Stage(name="train", seconds=180, run=_train, first=True),
    Stage(name="kernels-timed", seconds=420, run=_kernels, first=True),
    Stage(name="staged", seconds=150, run=_staged),
    Stage(name="four", seconds=120, run=_tests),
    Stage(name="step", seconds=240, run=_step),
    Stage(name="killed", seconds=90, run=_tests),
    Stage(name="memcheck", seconds=240, run=_memcheck),
    Stage(name="links", seconds=120, run=_links, gpus=2),
    Stage(name="lengths", seconds=420, run=_lengths, gpus=2),
)


def chosen(names: Sequence[str], gpus: int) -> tuple[list[Stage], list[str]]:
    """The stages of those names, in the plan's order, that this many GPUs allow, and the names of the others. Without
    names: those of the first half hour.
    """
    wanted = [stage for stage in STAGES if (stage.name in names if names else stage.first)]
    return [s for s in wanted if s.gpus <= gpus], [s.name for s in wanted if s.gpus > gpus]


def seconds_for(stages: Sequence[Stage], left_s: float) -> float:
    """What the first of the remaining stages may take of the time that is left: all of it, if it is the last."""
    return left_s * stages[0].seconds / sum(stage.seconds for stage in stages)
