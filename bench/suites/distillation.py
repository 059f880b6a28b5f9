"""The divergence of two heads a chunk of words at a time, beside whole logits: memory and time, on one CPU thread.

    python -m bench.suites.distillation [--rounds 7] [--out bench/results/distillation.json]

Forward and backward of `odc_triton.divergence`, with the student's and the teacher's heads fused, over the same of both
models' logits, and over TRL's `generalized_jsd_loss`. Peaks are as torch's profiler counts them. Ways take turns.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from odc_triton import divergence
from odc_triton.base.report import table
from odc_triton.nn import LMHead
from tests.support.peak_memory import peak_bytes

from ..harness import in_turn, median_ratio
from ..provenance import about, options_of, save_parts

SIZES = ((512, 16384, 256, 512), (1024, 32768, 256, 512))  # tokens, words, columns of the student's and the teacher's
BETAS = (0.0, 0.5, 1.0)
FUSED, WHOLE, TRL = "fused heads", "whole logits", "TRL, whole logits"


def _ways(tokens: int, words: int, own: int, theirs: int, beta: float) -> dict[str, Callable[[], Any]]:
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    from trl.experimental.gkd import GKDTrainer

    torch.manual_seed(0)
    h, teacher_h = torch.randn(tokens, own, requires_grad=True), torch.randn(tokens, theirs)
    student, teacher = LMHead(own, words), LMHead(theirs, words).requires_grad_(False)

    def whole(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        loss(F.linear(h, student.weight), F.linear(teacher_h, teacher.weight)).sum().backward()

    def trls(logits: Tensor, of_teacher: Tensor) -> Tensor:
        return GKDTrainer.generalized_jsd_loss(logits, of_teacher, beta=beta, reduction="none")

    return {
        FUSED: lambda: divergence(student(h), teacher(teacher_h), beta=beta).sum().backward(),
        WHOLE: lambda: whole(lambda *logits: divergence(*logits, beta=beta)),
        TRL: lambda: whole(trls),
    }


def measure(sizes: tuple[int, ...], beta: float, rounds: int) -> dict[str, Any]:
    ways = _ways(*sizes, beta)
    for run in ways.values():  # makes the gradients' memory, and warms up
        run()
    peaks = {name: peak_bytes(run) for name, run in ways.items()}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        for name in in_turn(list(ways), number):
            start_s = time.perf_counter()
            ways[name]()
            seconds[name].append(time.perf_counter() - start_s)
    row = {**dict(zip(("tokens", "words", "columns", "teacher_columns"), sizes, strict=True)), "beta": beta}
    row |= {"peak_bytes": peaks, "of_whole": peaks[FUSED] / peaks[WHOLE], "of_trl": peaks[FUSED] / peaks[TRL]}
    row |= {"time_of_whole": median_ratio(seconds[FUSED], seconds[WHOLE])}
    return row | {"median_s": {name: statistics.median(each) for name, each in seconds.items()}, "rounds": rounds}


def main() -> int:
    options = options_of(__doc__, rounds=7)
    torch.set_num_threads(1)
    start_s = time.monotonic()
    rows = [measure(sizes, beta, options.rounds) for sizes, beta in product(SIZES, BETAS)]
    if options.out is not None:
        command = f"python -m bench.suites.distillation --rounds {options.rounds}"
        save_parts(options.out, cpu=rows, about={"command": command, "took_s": time.monotonic() - start_s, **about()})
    shown = []
    for row in rows:
        took = row["time_of_whole"]
        memory = f"{row['of_whole']:.3f}, {row['of_trl']:.3f}"
        words = f"{took['ratio']:.2f} ({took['low']:.2f} to {took['high']:.2f})"
        shown.append([f"{row['tokens']} x {row['words']}", f"{row['beta']:g}", memory, words])
    print(table(shown, ("tokens x words", "beta", "memory of whole logits, of TRL's", "time of whole logits")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
