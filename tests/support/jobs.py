"""Training jobs on the ranks of one launch, one after the other: a launch costs more than a small job."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from odc_triton.jobs.train.grpo_options import GrpoOptions
from odc_triton.jobs.train.metrics import Metrics, read_metrics
from odc_triton.jobs.train.run_options import RunOptions
from odc_triton.jobs.train.sft_options import SftOptions
from tests.support import ranks

ENDED, STOPPED = "ended", "stopped by SIGTERM"


def train(
    rank: int, world: int, jobs: Sequence[RunOptions], stop_after: int | None = None, draws: bool = False
) -> list[str]:
    """How each job ended on this rank: it `ENDED`, was `STOPPED`, or its error.

    `stop_after`: rank 0 gets a stop request after so many steps; all ranks stop in the next one. `draws`: the
    report has images, which take longer than a small job.
    """
    from odc_triton.jobs.launcher.launch import Interrupted
    from odc_triton.jobs.train.grpo import train_grpo
    from odc_triton.jobs.train.pairs import train_pairs
    from odc_triton.jobs.train.sft import train_sft

    def on_metrics(metrics: Metrics) -> None:
        if metrics["step"] == stop_after:
            os.kill(os.getpid(), signal.SIGTERM)

    ends = []
    for wanted in jobs:
        job: Any = {GrpoOptions: train_grpo, SftOptions: train_sft}.get(type(wanted), train_pairs)
        try:
            with mock.patch("odc_triton.jobs.train.outcome.can_draw", return_value=draws):
                job(wanted, on_metrics)
            ends.append(ENDED)
        except Interrupted as wish:
            ends.append(f"stopped by {wish.signal.name}")
        except (OSError, ValueError, RuntimeError) as error:
            ends.append(f"{type(error).__name__}: {error}")
    return ends


def run(world: int, *jobs: RunOptions, stop_after: int | None = None, draws: bool = False) -> list[str]:
    """Runs the jobs on `world` ranks; how each ended, the same on all of them."""
    first, *others = ranks.run(train, world, jobs, stop_after, draws)
    assert others == [first] * (world - 1)
    return first


def lines(out: str | Path) -> list[Metrics]:
    """The metrics of a run's steps, each of which is there once."""
    found = read_metrics(Path(out) / "metrics.jsonl")
    assert [line["step"] for line in found] == list(range(1, len(found) + 1))
    return found


def losses(out: str | Path) -> list[float]:
    return [line["loss"] for line in lines(out)]
