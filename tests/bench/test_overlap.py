"""What the measurement of overlapping rollouts counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench import rollouts
from bench.suites.overlap import OVERLAPPED, PHASES, RANKS, SERVER, Turn, least_step_s, summary
from bench.suites.overlap_bound import least_s, shared_out
from odc_triton.rl.prompts import completion_seed


def test_the_lengths_are_those_that_were_drawn(tmp_path: Path) -> None:
    rollouts.write(tmp_path / "again.json", rollouts.draw())
    assert (tmp_path / "again.json").read_text() == rollouts.FILE.read_text()
    lengths = rollouts.by_seed(rollouts.read(), 7)
    assert len(lengths) == rollouts.STEPS * rollouts.PROMPTS * rollouts.GENERATIONS
    assert lengths[completion_seed(7, 2, 5, 3)] == rollouts.read()[2][5][3]


@pytest.mark.parametrize(
    ("work", "sampling_s", "wanted"),
    [
        ([(1, 1), (5, 2)], [0], 7),  # the last group, once it is there
        ([(1, 4), (2, 4), (3, 1)], [0], 10),  # all of them, from the first one on
        ([(1, 1), (4, 2), (4, 3)], [0], 9),  # two at once
        ([(2, 3), (4, 1)], [4, 2], 5),  # no rank is ever idle: (4 + 2 + 3 + 1) / 2
        ([(2, 0.5), (6, 4)], [6, 2], 8),  # the last group, by both ranks
        ([(1, 0.5), (1, 0.5)], [6, 2], 6),  # the rank that samples longest
    ],
)
def test_least_seconds(work: list[tuple[float, float]], sampling_s: list[float], wanted: float) -> None:
    assert least_s(work, sampling_s) == wanted


def test_work_is_shared_out_by_cost() -> None:
    assert shared_out(6, [1, 3, 2]) == [1, 3, 2]


def turn(way: str, seconds: float, **changes: Any) -> Turn:
    usual = {"came_s": {0: 2, 1: 4.5}, "sampled_s": 5, "scoring_s": 0.5, "computed_s": 4, "waited_s": 0}
    return Turn(way=way, metrics={"seconds": seconds}, costs=[1, 3], **usual | changes)


def test_the_least_step_beside_a_server() -> None:
    """Scoring is the rank's own work: 4.5 s to do, 3/4 of it for the group that comes last; 1 s is for all else."""
    assert least_step_s([turn(PHASES, 10)], samples_elsewhere=True) == 1 + 4.5 + 0.75 * 4.5


def test_the_least_step_of_ranks() -> None:
    """One samples for 5 s, one for 3; 6 s to compute; 10 - 5 - 4 s are for all else."""
    ranks = [turn(PHASES, 10, came_s={1: 5}), turn(PHASES, 10, came_s={0: 3}, sampled_s=3, computed_s=2)]
    assert least_step_s(ranks, samples_elsewhere=False) == 1 + max((5 + 3 + 6) / 2, 5 + 0.75 * 6 / 2, 3 + 6 / 2)


@pytest.mark.parametrize("setting", [SERVER, RANKS])
def test_summary(setting: Any) -> None:
    """Without the first step. Whole seconds apart from the bound's: 10 in phases, 8 overlapped."""
    of_rank = [turn(way, seconds) for seconds in (99, 10, 10) for way in setting.ways]
    of_rank = [each if each.way != OVERLAPPED else turn(OVERLAPPED, 8) for each in of_rank]
    found = summary(setting, [of_rank] * setting.ranks)
    assert found["steps"] == 2
    assert found["seconds"][PHASES] == [10, 10]
    assert found["ratio"]["ratio"] == 10 / 8
    assert found["of_bound"]["ratio"] == pytest.approx(found["ratio"]["ratio"] / found["bound"]["ratio"])
    assert found["ways"][PHASES]["median_s"] == 10
    assert found["came_s"][0] == sorted([2, 4.5] * setting.ranks)
