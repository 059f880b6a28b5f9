"""The stages: what each run starts, how long it may take, and which file says what it found."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .inputs import LONGEST


@dataclass(frozen=True, kw_only=True)
class Run:
    """`python -m WORDS`, where {out} is the run's folder and {inputs} the one of `inputs.py`.

    `rehearsal`: the words on the CPU, () if there is nothing to try there. `found`: the file in {out} to report: JSON,
    or lines of JSON. `passes`: what that must say. `gpus`: how many it needs. `tries`: how often it is started, as a
    fault of the GPU or a hang may end the process; it must then keep what it has. `under`: a program that runs it.
    """

    words: tuple[str, ...]
    rehearsal: tuple[str, ...] = ()
    seconds: int
    found: str = ""
    passes: Callable[[Any], bool] = bool
    gpus: int = 1
    tries: int = 1
    under: tuple[str, ...] = ()


TESTS = ("pytest", "-q", "-p", "bench.suites.gpu.outcomes", "-p", "no:cacheprovider")
# Versions may differ from the pinned ones, so warnings are no errors. A test that hangs in the driver ends with its
# worker, as no signal reaches Python there.
TESTS += ("--continue-on-collection-errors", "-W", "default", "--timeout-method", "thread", "--maxschedchunk", "1")


def _passed(tests: list[dict[str, Any]]) -> bool:
    outcomes = {test["outcome"] for test in tests}
    return "passed" in outcomes and "failed" not in outcomes


def _tests(seconds: int, *files: str, workers: int = 1, test_s: int = 120, rehearsal: tuple[str, ...] = ()) -> Run:
    """The tests of these files that are marked `gpu`, the most important file first. `test_s`: for one test."""
    words = (*TESTS, "-m", "gpu", "-n", str(workers), "--timeout", str(test_s), *files)
    instead = (*TESTS, "-m", "not gpu and not slow", "-n", "1", *rehearsal) if rehearsal else ()
    return Run(words=words, rehearsal=instead, seconds=seconds, found="tests.jsonl", passes=_passed)


def _learned(lines: list[dict[str, Any]]) -> bool:
    """The last ten losses are on average a tenth below the first ten."""
    losses = [line["loss"] for line in lines if "loss" in line]
    return len(losses) >= 100 and sum(losses[-10:]) <= 0.9 * sum(losses[:10])


def _train(*words: str) -> Run:
    given = ("odc_triton.cli", "train", "sft", "--data", "{inputs}/data.jsonl", "--init", "{inputs}/config.json")
    given += ("--tokenizer", "{inputs}/tokenizer.json", "--out", "{out}/run", "--steps", "100", "--truncate", *words)
    return Run(
        words=(*given, "--lr", "1e-3", "--token-cap", "2048", "--dtype", "bf16"),
        rehearsal=(*given, "--lr", "1e-2", "--token-cap", "128"),
        seconds=60,
        found="run/metrics.jsonl",
        passes=_learned,
    )


def _bench(seconds: int, *words: str, variants: str = "", gpus: int = 1) -> Run:
    """`odc-triton bench`: ways to train beside each other, as far as it gets."""
    given = ("odc_triton.cli", "bench", "--lengths", "{inputs}/lengths.txt", "--init", "{inputs}/model.json")
    given += ("--out", "{out}", "--ranks", str(gpus), *(("--variants", variants) if variants else ()), *words)
    return Run(
        words=(*given, "--dtype", "bf16", "--token-cap", str(LONGEST), "--device", "cuda"),
        rehearsal=(*given, "--device", "cpu", "--minibatches", "1", "--samples-per-rank", "1"),
        seconds=seconds,
        found="lengths.json",
        gpus=gpus,
    )


def _profile(*words: str) -> Run:
    given = ("odc_triton.cli", "profile", "--init", "{inputs}/model.json", "--out", "{out}/run", *words)
    return Run(
        words=(*given, "--dtype", "bf16", "--token-cap", str(LONGEST), "--samples-per-rank", "2"),
        rehearsal=(*given, "--token-cap", "64", "--samples-per-rank", "1", "--minibatches", "1"),
        seconds=60,
        found="run/profile.json",
    )


def _cells_passed(lines: list[dict[str, Any]]) -> bool:
    """All cells that were reached: there are more than there is time."""
    cells = [line["cell"] for line in lines if "cell" in line]
    return bool(cells) and all(cell["passed"] for cell in cells)


def _kernels(seconds: int, *words: str, rehearsal: tuple[str, ...] = (), tries: int = 1) -> Run:
    given = ("bench.kernels.run", "--resume", "--out", "{out}", "--seconds", str(round(0.9 * seconds)))
    instead = (*given, *rehearsal) if rehearsal else ()
    how = {"found": "kernels.jsonl", "passes": _cells_passed, "tries": tries}
    return Run(words=(*given, *words), rehearsal=instead, seconds=seconds, **how)


def _named(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/{folder}/test_{name}.py" for folder, _, name in (each.partition("/") for each in names))


_KERNELS = _named("kernels/gather_scatter", "kernels/matrix", "kernels/staged", "kernels/engine_step")
_KERNELS += _named("kernels/embedding", "kernels/linear_cross_entropy", "kernels/linear_divergence")
_KERNELS += _named("kernels/qkv", "kernels/exact_adds")
_KERNELS += _named("kernels/flags", "kernels/ops")
_ENGINE = _named("gpu/cuda_engine", "engine/gathered", "gpu/cuda_steady", "hf/attention", "engine/gathered_usage")
_ENGINE += _named("gpu/cuda_tree", "engine/foreach", "balance/collate", "gpu/cuda_copies")
_ROW = "unsharded,FSDP2 + LB-Micro,FSDP2 symmetric memory + LB-Micro,FSDP2 + use_odc + LB-Mini,ODC + LB-Mini"
_REPLACED = ("--replace-layers", "--fused-head")
_RAGGED = ("--check", "--operator", "linear staged", "linear_dx staged", "--tokens", "4095", "--world", "7")
_PREMISES = ("bench.kernels.premises", "{out}/premises.jsonl")
# Every tensor a separate allocation, so that a wrong address leaves it.
_MEMCHECK = ("env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1", "compute-sanitizer", "--tool", "memcheck")
_MEMCHECK += ("--error-exitcode", "99")
_CHECK = ("bench.kernels.run", "--check", "--world", "2", "--seconds", "170", "--out", "{out}")

Stages = dict[str, dict[str, Run]]
STAGES: Stages = {
    "premises": {
        "doctor": Run(words=("odc_triton.cli", "doctor"), seconds=40),
        "machine": Run(words=_PREMISES, rehearsal=(*_PREMISES, "--rehearse"), seconds=60, found="premises.jsonl"),
        "heap": _tests(60, *_named("gpu/cuda_heap"), rehearsal=_named("comm/layout")),
    },
    # Kernels that wait for another process are all that could hang a GPU.
    "split-early": {"parity": _tests(60, *_named("gpu/cuda_split"), "-k", "whole_samples and Qwen2", test_s=50)},
    "kernels": {
        "right": _tests(300, *_KERNELS, workers=os.cpu_count() or 1, rehearsal=(*_KERNELS[:1], "-k", "float32"))
    },
    # Two at a time: processes take longer to start than to compute.
    "engine": {"tests": _tests(210, *_ENGINE, workers=2, rehearsal=_named("balance/collate"))},
    "rows": {"one GPU": _bench(240, "--rounds", "2", "--minibatches", "3", variants=_ROW)},
    "train": {
        "1 process": _train("--ranks", "1", "--samples-per-rank", "16"),
        "2 processes": _train("--ranks", "2", "--samples-per-rank", "8"),
    },
    "timed": {"kernels": _kernels(420, rehearsal=("--rehearse", "--world", "2", "--tokens", "3"), tries=4)},
    "profile": {"1 rank": _profile("--ranks", "1"), "2 ranks": _profile("--ranks", "2")},
    "more": {
        "replaced layers": _train("--ranks", "2", "--samples-per-rank", "8", *_REPLACED),
        "profile of replaced layers": _profile("--ranks", "1", *_REPLACED),
        "staged": _kernels(75, *_RAGGED, "--model", "llama-3-8b"),
        "four processes": _tests(120, *_named("gpu/four_processes")),
        "killed": _tests(90, *_named("gpu/killed")),
        "split": _tests(150, *_named("gpu/cuda_split")),
        "bridge": _tests(60, *_named("gpu/cuda_bridge")),
        "memcheck": Run(words=_CHECK, seconds=240, found="kernels.jsonl", passes=_cells_passed, under=_MEMCHECK),
    },
    "links": {"pairs": Run(words=("bench.suites.links", "--out", "{out}"), seconds=300, found="links.jsonl", gpus=2)},
    "lengths": {"two GPUs": _bench(420, "--rounds", "2", "--minibatches", "3", gpus=2)},
}
FIRST = ("premises", "split-early", "kernels", "engine", "rows", "train", "timed", "profile")
