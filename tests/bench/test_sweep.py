"""The bench of runs over one base: it compares arms that train alike, and its kills leave nothing wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.suites.sweep import COPIES, OURS, RUNS, Run, bound, compared

ROOT = Path(__file__).parents[2]


def run(cost: float, shared_cost: float) -> Run:
    return Run(data="", samples=2, lr=0.1, seed=0, cost=cost, shared_cost=shared_cost)


@pytest.mark.parametrize(
    ("costs", "shared", "want"),
    [
        ((4, 4), (2, 2), 1.0),  # evenly shared steps, and a run for each rank
        ((4, 4), (3, 3), 1.5),  # a rank that has 3 of 4 in each step
        ((4, 2, 2), (2, 1, 1), 1.0),  # the rank that is free first takes both
        ((6, 2), (3, 1), 4 / 6),  # ours ends with one rank at work
    ],
)
def test_bound_is_of_the_slowest_rank(costs: tuple[int, ...], shared: tuple[int, ...], want: float) -> None:
    assert bound([run(*each) for each in zip(costs, shared, strict=True)]) == want


def found(losses: list[float], digest: str = "a") -> list[dict]:
    """One round of two ranks, each with half of each run's loss."""
    own = [{"run": number, "losses": [loss / 2], "digest": digest} for number, loss in enumerate(losses)]
    return [{"runs": [own, own]}]


LOSSES = [2.0 + number for number in range(RUNS)]


@pytest.mark.parametrize(
    ("ours", "copies", "error"),
    [(LOSSES, [1.001 * loss for loss in LOSSES], "did not train alike"), ([2.0] * RUNS, [2.0] * RUNS, "equal losses")],
)
def test_arms_that_cannot_be_compared_are_an_error(ours: list[float], copies: list[float], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        compared({OURS: found(ours), COPIES: found(copies)})


@pytest.mark.parametrize("digest", ["a", "b"])
def test_bits_are_compared(digest: str) -> None:
    report = compared({OURS: found(LOSSES), COPIES: found(LOSSES, digest)})
    assert report == {"losses_apart": {OURS: 0.0, COPIES: 0.0}, "has_bits_of_copies": digest == "a"}


@pytest.mark.slow
def test_it_runs(tmp_path: Path) -> None:
    out = tmp_path / "sweep.json"
    command = [sys.executable, "-m", "bench.suites.sweep", str(out), "--quick", "--rounds", "1"]
    subprocess.run(command, check=True, cwd=ROOT, timeout=600)
    report = json.loads(out.read_text())["samples_2"]
    assert report["has_bits_of_copies"]
    assert report["base_over_copies"]["base"] <= 0.52
