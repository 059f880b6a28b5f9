"""The stages that measure: kernels, a step, and where there are several GPUs the links and all ways to train."""

from __future__ import annotations

import json
import math
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from .outcome import Outcome
from .process import run

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
# Of the step: ranks, and how the model is changed.
STEPS = {
    "1 rank": (1, []),
    "1 rank, replaced layers": (1, ["--replace-layers", "--fused-head"]),
    "2 ranks": (2, []),
    "2 ranks, replaced layers": (2, ["--replace-layers", "--fused-head"]),
}
_TAIL_LINES = 40


def run_kernels(out: Path, environment: dict[str, str], seconds: float) -> Outcome:
    """bench.run, which keeps its own files up to date while it runs."""
    begin_s = time.monotonic()
    command = [sys.executable, "-m", "bench.run", "--seconds", f"{max(seconds - 20, 1):.0f}", "--out", str(out)]
    code, text = run(command, environment, seconds)
    if code is None:
        text, code = f"{text}\nstopped: it did not end by itself", 1
    return Outcome(
        stage="kernels",
        passed=code == 0,
        seconds=time.monotonic() - begin_s,
        details=["```", *text.splitlines()[-200:], "```"],
        data={"exit": code},
    )


def run_steps(config: dict[str, Any], given: list[str], environment: dict[str, str], seconds: float) -> Outcome:
    """`odc-triton profile` for each of STEPS, as far as they come in the time. `given`: its other options."""
    begin_s = time.monotonic()
    details: list[str] = []
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        init = Path(scratch) / "config.json"
        init.write_text(json.dumps(config))
        for number, (name, (ranks, changes)) in enumerate(STEPS.items()):
            out = Path(scratch) / str(number)
            command = [sys.executable, "-m", "odc_triton.cli", "profile", "--init", str(init), "--out", str(out)]
            left_s = seconds - (time.monotonic() - begin_s)
            code, text = run([*command, "--ranks", str(ranks), *changes, *given], environment, max(left_s, 1))
            report = out / "profile.json"
            found[name] = json.loads(report.read_text()) if code == 0 and report.exists() else {"exit": code}
            details += [f"## {name}", "", "```", *text.splitlines()[-_TAIL_LINES:], "```", ""]
    return Outcome(
        stage="step",
        passed=all("ranks" in each for each in found.values()),
        seconds=time.monotonic() - begin_s,
        details=details,
        data={"steps": found},
    )


def long_lengths(count: int, longest: int, seed: int = 0) -> list[int]:
    """LongAlign's lengths (mean 16.5 K, at most 64 K tokens), scaled down to `longest`: log-normal."""
    generator = random.Random(seed)
    middle = math.log(longest / 6.2)  # the ratio of LongAlign's longest to its median
    return [min(max(int(generator.lognormvariate(middle, 1.0)), 16), longest) for _ in range(count)]


def run_lengths(
    config: dict[str, Any], given: list[str], environment: dict[str, str], seconds: float, *, ranks: int, longest: int
) -> Outcome:
    """`odc-triton bench --lengths` on `ranks` GPUs, as far as it comes in the time. `given`: its other options."""
    begin_s = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        init, lengths, out = (Path(scratch) / name for name in ("config.json", "lengths.txt", "out"))
        init.write_text(json.dumps(config))
        lengths.write_text("".join(f"{length}\n" for length in long_lengths(256, longest)))
        command = [sys.executable, "-m", "odc_triton.cli", "bench", "--lengths", str(lengths), "--init", str(init)]
        code, text = run([*command, "--out", str(out), "--ranks", str(ranks), *given], environment, seconds)
        return _kept("lengths", out / "lengths.json", out / "lengths.md", code, text, begin_s)


def run_links(given: list[str], environment: dict[str, str], seconds: float) -> Outcome:
    """bench.links, as far as it comes in the time."""
    begin_s = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "out"
        command = [sys.executable, "-m", "bench.links", "--out", str(out), *given]
        code, text = run(command, environment, seconds)
        return _kept("links", out / "links.json", out / "links.md", code, text, begin_s)


def _kept(stage: str, data: Path, table: Path, code: int | None, text: str, begin_s: float) -> Outcome:
    """What a command that keeps its files up to date came to. Cut short it passes, if it had found something."""
    lines = table.read_text().splitlines() if table.exists() else []
    details = ["stopped when its time was over: what it had by then"] * (code is None) + [*lines, ""]
    return Outcome(
        stage=stage,
        passed=data.exists() and code in (0, None),
        seconds=time.monotonic() - begin_s,
        details=[*details, "```", *text.splitlines()[-_TAIL_LINES:], "```"],
        data={"exit": code, "found": json.loads(data.read_text()) if data.exists() else None},
    )
