"""What every stage runs, on a GPU and in a rehearsal, side by side; and how they share the time."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import measured
from .measured import Runs, Training
from .outcomes import Ledger
from .tests import run_checks, run_tests


def _qwen(vocabulary: int, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, longest: int) -> dict:
    sizes = {"vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "max_position_embeddings": longest}
    return {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], **sizes, "tie_word_embeddings": True}


QWEN_1_5B = _qwen(151936, 1536, 8960, 28, 12, 2, 32768)
TINY_QWEN = _qwen(128, 32, 64, 1, 2, 1, 64)
# 100 steps take seconds on a GPU.
TRAINED = _qwen(4096, 512, 1408, 8, 8, 4, 2048) | {"tie_word_embeddings": False}
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
    """`tests`, by stage; `checked`: rows of options of bench.kernels.run; `step`: processes, changes of the model."""

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
        # Most important first, as below.
        "kernels-right": Tests(
            files=(
                "tests/kernels/test_gather_scatter.py",
                "tests/kernels/test_matrix.py",
                "tests/kernels/test_staged.py",
                "tests/kernels/test_engine_step.py",
                "tests/kernels/test_embedding.py",
                "tests/kernels/test_linear_cross_entropy.py",
                "tests/kernels/test_qkv.py",
                "tests/kernels/test_exact_adds.py",
                "tests/kernels/test_addresses.py",
                "tests/kernels/test_flags.py",
                "tests/kernels/test_refusals.py",
                "tests/kernels/test_staged_refusals.py",
                "tests/kernels/test_embedding_refusals.py",
                "tests/kernels/test_linear_cross_entropy_refusals.py",
                "tests/kernels/test_qkv_refusals.py",
                "tests/kernels/test_worked_examples.py",
            ),
            workers=min(16, os.cpu_count() or 1),
        ),
        # Two at a time: processes take longer to start than to compute.
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
        "split": Tests(files=("tests/gpu/test_cuda_split.py",)),
        "bridge": Tests(files=("tests/gpu/test_cuda_bridge.py",)),
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
        "split": Tests(
            files=("tests/sequence/test_parity.py",), marker=_ON_THE_CPU, words=("-k", "two-cpu-interpreter")
        ),
        "bridge": Tests(files=("tests/fsdp2/test_parity.py",), marker=_ON_THE_CPU, words=("-k", "cpu-interpreter")),
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
    """What a stage gets. `gpus`: how many there are, or how many a rehearsal pretends there are."""

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


@dataclass(frozen=True)
class Stage:
    """`run`: returns whether it passed, and if not whether only time ran out. `seconds`: its share of the time.
    `first`: in the first half hour. `gpus`: how many it needs.
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


def _runs(do: Callable[[Runs, Here, Path], dict[str, Any]]) -> Callable[[Here, str, float], dict[str, Any]]:
    """A stage whose runs write to a new folder, removed when it ends."""

    def run(here: Here, stage: str, seconds: float) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            return do(here.runs(stage, seconds), here, Path(folder))

    return run


_train = _runs(lambda runs, here, folder: measured.run_train(runs, here.given.training, folder))
_kernels = _runs(lambda runs, here, _: measured.run_kernels(runs, here.ledger.folder, here.given.timed))
_staged = _runs(lambda runs, here, folder: measured.run_checked(runs, here.given.checked, folder))
_memcheck = _runs(lambda runs, _here, _folder: measured.run_memcheck(runs))
_links = _runs(lambda runs, here, folder: measured.run_links(runs, here.given.links_words, folder))


@_runs
def _step(runs: Runs, here: Here, folder: Path) -> dict[str, Any]:
    return measured.run_steps(runs, here.given.model, here.given.step_words, here.given.step, folder)


@_runs
def _lengths(runs: Runs, here: Here, folder: Path) -> dict[str, Any]:
    given, sizes = here.given, {"ranks": here.gpus, "longest": here.given.longest}
    return measured.run_lengths(runs, given.model, given.lengths_words, folder, **sizes)


STAGES = (
    Stage("checks", 120, _checks, first=True),
    Stage("kernels-right", 480, Here.tests, first=True),
    Stage("engine", 360, Here.tests, first=True),
    Stage("train", 180, _train, first=True),
    Stage("kernels-timed", 420, _kernels, first=True),
    Stage("staged", 150, _staged),
    Stage("four", 120, Here.tests),
    Stage("step", 240, _step),
    Stage("killed", 90, Here.tests),
    Stage("split", 150, Here.tests),
    Stage("bridge", 60, Here.tests),
    Stage("memcheck", 240, _memcheck),
    Stage("links", 120, _links, gpus=2),
    Stage("lengths", 420, _lengths, gpus=2),
)


def chosen(names: Sequence[str], gpus: int) -> tuple[list[Stage], list[str]]:
    """The named stages that this many GPUs allow, in the plan's order, and the names of the others. Without names:
    those of the first half hour.
    """
    wanted = [stage for stage in STAGES if (stage.name in names if names else stage.first)]
    return [s for s in wanted if s.gpus <= gpus], [s.name for s in wanted if s.gpus > gpus]


def seconds_for(stages: Sequence[Stage], left_s: float) -> float:
    """How much of the time left the first of the remaining stages may take: all of it, if it is the last."""
    return left_s * stages[0].seconds / sum(stage.seconds for stage in stages)
