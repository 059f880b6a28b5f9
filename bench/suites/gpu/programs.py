"""Sections that start processes: tests and trainings of several ranks, a checker of memory, several GPUs."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ...cut import scaled_minibatches
from ...device import Gpu
from ...provenance import ROOT, read_lines
from ...stdlib_corpus import build_corpus, qwen2, write_text
from .plan import LINES
from .updates import LONGEST, QWEN_1_5B, SMALL

_CUT = (124, 137)  # what `timeout` returns
_OURS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "PYTEST_XDIST_WORKER")  # of this process
_REHEARSED = ("tests/balance/test_collate.py", "tests/comm/test_layout.py")
_TRAINED = qwen2(4096, 512, 1408, 8, 8, 4, 2048, True)


def _run(seconds: float, *words: str, **more: str) -> int:
    """The status of a program, which writes where this process does, and is ended with all it started."""
    env = {name: value for name, value in os.environ.items() if name not in _OURS} | more
    return subprocess.run(["timeout", "-k", "5", f"{seconds:.0f}", *words], cwd=ROOT, env=env).returncode


def tests(
    gpu: Gpu, *, folder: Path, seconds: float, name: str, tests: Sequence[str], workers: int, least: int
) -> Iterator[dict[str, Any]]:
    """Versions may differ from the pinned ones, so warnings are no errors. A test that hangs in the driver ends with
    its worker, as no signal reaches Python there.
    """
    file = folder / LINES
    before = len(read_lines(file))
    words = ["-q", "-p", "bench.suites.gpu.pytests", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    words += ["-W", "default", "--timeout", "90", "--timeout-method", "thread", "--maxschedchunk", "1"]
    if gpu.rehearsal:
        tests, workers, least = _REHEARSED, 1, 1
    words += [
        "-n",
        str(max(1, min(workers, (os.cpu_count() or 2) // 2))),
        "-m",
        "not gpu and not slow" if gpu.rehearsal else "gpu",
    ]
    code = _run(
        seconds, sys.executable, "-m", "pytest", *words, *tests, ODC_SUITE_LINES=str(file), ODC_SUITE_SECTION=name
    )
    outcomes = [line["outcome"] for line in read_lines(file)[before:] if "outcome" in line]
    counts = {each: outcomes.count(each) for each in ("passed", "failed", "skipped")}
    passed = code in (0, *_CUT) and not counts["failed"] and counts["passed"] >= least
    yield {"what": "tests", "counts": counts, "exit": code, "passed": passed}


def train(gpu: Gpu, *, folder: Path, seconds: float, steps: int, share: float) -> Iterator[dict[str, Any]]:
    """`odc-triton train sft` on the standard library, in bf16 on a GPU: `share` of the first losses at the end."""
    folder = folder / "train"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    config = SMALL | {"vocab_size": 512} if gpu.rehearsal else _TRAINED
    records, _ = build_corpus(Path(sysconfig.get_path("stdlib")) / ("email" if gpu.rehearsal else ""))
    write_text(folder, random.Random(0).sample(records, min(200 if gpu.rehearsal else 3000, len(records))), config)
    how = ("--lr", "1e-2", "--token-cap", "128") if gpu.rehearsal else ("--lr", "1e-3", "--token-cap", "2048")
    given = ("sft", "--data", f"{folder}/data.jsonl", "--init", f"{folder}/config.json", *how, "--truncate")
    given += ("--tokenizer", f"{folder}/tokenizer.json", "--steps", str(steps))
    given += () if gpu.rehearsal else ("--dtype", "bf16")
    for ranks in (1, 2):
        words = (*given, "--ranks", str(ranks), "--samples-per-rank", str(16 // ranks), "--out", f"{folder}/{ranks}")
        code = _run(seconds / 2, sys.executable, "-m", "odc_triton.tools.cli", "train", *words)
        losses = [line["loss"] for line in read_lines(folder / str(ranks) / "metrics.jsonl") if "loss" in line]
        learned = len(losses) >= 20 and sum(losses[-10:]) <= share * sum(losses[:10])
        yield {"what": f"{ranks} ranks", "exit": code, "losses": losses, "passed": learned and code in (0, *_CUT)}


def memcheck(gpu: Gpu, *, folder: Path, seconds: float) -> Iterator[dict[str, Any]]:
    """`right`, with every tensor an allocation of its own, so that a wrong address leaves it."""
    tool = ("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "99")
    if not gpu.rehearsal and shutil.which(tool[0]) is None:
        yield {"skipped": f"{tool[0]} is not installed"}
        return
    folder = folder / "memcheck"
    folder.mkdir(exist_ok=True)
    (folder / LINES).unlink(missing_ok=True)
    words = (*tool * (not gpu.rehearsal), sys.executable, "-m", "bench.suites.gpu", *["--rehearse"] * gpu.rehearsal)
    words += ("--only", "right", "--out", str(folder), "--until", str(time.time() + seconds), "--each", str(seconds))
    code, lines = _run(seconds, *words, PYTORCH_NO_CUDA_MEMORY_CACHING="1"), read_lines(folder / LINES)
    wrong = [line for line in lines if "error" in line or line.get("passed") is False]
    passed = (
        False if wrong or code not in (0, *_CUT) else any(line.get("verdict") == "passed" for line in lines) or None
    )
    yield {"what": "right", "exit": code, "lines": len(lines), "wrong": wrong, "passed": passed}


def links(gpu: Gpu, *, folder: Path, seconds: float) -> Iterator[dict[str, Any]]:
    more = ("--backend", "cpu-sharded", "--sizes", "65536", "--columns", "16", "--tokens", "16")
    words = (sys.executable, "-m", "bench.suites.links", "--out", str(folder / "links"), *more * gpu.rehearsal)
    code = _run(seconds, *words)
    for line in read_lines(folder / "links" / "links.jsonl"):
        yield {"what": "a place", **line}
    yield {"what": "links", "exit": code, "passed": code == 0}


def lengths(gpu: Gpu, *, folder: Path, seconds: float) -> Iterator[dict[str, Any]]:
    """`odc-triton bench` on two GPUs: LongAlign's lengths, scaled down, a 1.5 B model."""
    folder, longest = folder / "lengths", 64 if gpu.rehearsal else LONGEST
    folder.mkdir(exist_ok=True)
    config = SMALL if gpu.rehearsal else QWEN_1_5B
    (folder / "model.json").write_text(json.dumps({"model_type": "qwen2", **config}))
    drawn, _ = scaled_minibatches("longalign", longest=longest, samples=256, minibatches=1)
    (folder / "lengths.txt").write_text("".join(f"{each}\n" for each in drawn))
    given = ("--lengths", f"{folder}/lengths.txt", "--init", f"{folder}/model.json", "--out", str(folder))
    how = "--device cpu --rounds 1 --minibatches 1 --samples-per-rank 1"
    if not gpu.rehearsal:
        how = f"--device cuda --dtype bf16 --token-cap {LONGEST} --rounds 2 --minibatches 3"
    code = _run(seconds, sys.executable, "-m", "odc_triton.tools.cli", "bench", *given, "--ranks", "2", *how.split())
    file = folder / "lengths.json"
    for name, found in (json.loads(file.read_text())["variants"] if file.exists() else {}).items():
        yield {"what": name, **{key: value for key, value in found.items() if key != "turns"}}
    yield {"what": "lengths", "exit": code, "passed": code == 0}
