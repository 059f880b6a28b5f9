"""A job from measured single-sequence times: what it fits, what it predicts, and, slowly, whether that is true."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import numpy as np
import pytest

from bench.demo import VARIANTS
from bench.harness import Work
from bench.reports.fitted import SequenceTime, from_measured, nonnegative_least_squares
from bench.reports.simulated import measure, predict
from odc_triton.comm.launch import launch
from odc_triton.data.dataset import DataSummary, TokenizedDataset
from odc_triton.simulate.run import simulate
from tests.support.models import SIZES

CONFIG = SIZES | {"max_position_embeddings": 1024}
STEP, LAUNCH, LINEAR, QUADRATIC = 0.5, 0.02, 1e-3, 1e-7


def times(step: float = STEP, launch: float = LAUNCH) -> list[SequenceTime]:
    return [
        SequenceTime(tokens=s, microbatches=m, seconds=step + m * (launch + LINEAR * s + QUADRATIC * s**2))
        for s in (100, 500, 2000)
        for m in (1, 3)
    ]


@pytest.mark.parametrize(("step", "launch"), [(STEP, LAUNCH), (0.0, LAUNCH), (STEP, 0.0)])
def test_exact_times_are_found_again(step: float, launch: float) -> None:
    job = from_measured(times(step, launch), ranks=2, layers=4)
    # least squares in fp64 over columns that are scaled to each other
    assert job.step_s == pytest.approx(step, rel=1e-6, abs=1e-9)
    assert job.seconds([300, 50]) == pytest.approx(launch + LINEAR * 350 + QUADRATIC * (300**2 + 50**2), rel=1e-6)


def test_the_least_error_among_nonnegative_coefficients() -> None:
    """Noisy times whose free least squares has a negative coefficient; the oracle is a grid."""
    rng = random.Random(3)
    lengths = [50 * (i + 1) for i in range(12)]
    seconds = [s * (1 - 2e-4 * s) + rng.uniform(0, 20) for s in lengths]
    table = np.array([[s * s, s] for s in lengths], float)
    assert np.linalg.lstsq(table, np.array(seconds), rcond=None)[0].min() < 0

    def error(*coefficients: float) -> float:
        return float(np.square(table @ coefficients - seconds).sum())

    fit = nonnegative_least_squares(table, seconds)
    assert fit[0] == 0
    grid = itertools.product(np.linspace(0, 1e-3, 21), np.linspace(0, 2 * fit[1], 42))
    assert error(*fit) <= min(error(*point) for point in grid)
    exact = np.array([3e-10, 2e-6])
    assert nonnegative_least_squares(table, table @ exact) == pytest.approx(exact, rel=1e-6)


def test_a_prediction_in_closed_form() -> None:
    """Two ranks, one sample a microbatch: a barrier costs the larger of each pair, ODC the larger sum."""
    job = from_measured(times(), ranks=2, layers=4)
    lengths = [1000, 100, 400, 300]  # LocalSort: rank 0 has 1000, 100; rank 1 has 400, 300
    each = {s: LAUNCH + LINEAR * s + QUADRATIC * s**2 for s in lengths}
    told = {
        schedule: simulate([lengths], job=job, schedule=schedule, balance="local", token_cap=1000).step_s
        for schedule in ("fsdp", "odc")
    }
    assert told["fsdp"] == pytest.approx(STEP + each[1000] + each[300], rel=1e-6)
    assert told["odc"] == pytest.approx(STEP + max(each[1000] + each[100], each[400] + each[300]), rel=1e-6)


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="2 lengths and 2 numbers of microbatches: measure at least three lengths"):
        from_measured(times()[:4], ranks=2, layers=4)
    with pytest.raises(ValueError, match="3 lengths and 1 numbers"):
        from_measured(times()[::2], ranks=2, layers=4)
    for change, message in (
        ({"tokens": 0}, "tokens is 0"),
        ({"microbatches": 0}, "microbatches is 0"),
        ({"seconds": float("nan")}, "seconds is nan"),
        ({"seconds": -1.0}, "seconds is -1.0"),
    ):
        with pytest.raises(ValueError, match=message):
            SequenceTime(**{"tokens": 1, "microbatches": 1, "seconds": 1.0, **change})


@pytest.mark.slow
def test_the_measurement_and_its_prediction_run(tmp_path: Path) -> None:
    """On a tiny model: every variant is measured and predicted. How close the two are is the slow test's affair."""
    offsets = np.array([0, 500, 700, 1000, 1900, 2000, 3000])
    spans = np.stack([offsets[:-1], offsets[1:]], axis=1)
    summary = DataSummary(records=6, samples=6, tokens=3000, target_tokens=2994)
    TokenizedDataset(np.arange(3000, dtype=np.int32) % 97, offsets, spans, summary).save(tmp_path / "data.npz")
    work = Work(dataset=str(tmp_path / "data.npz"), config=CONFIG, minibatches=[[0, 1, 2, 3, 4, 5]], token_cap=1024)
    points = [(32, 1), (256, 1), (1000, 1), (32, 2)]
    singles, measured = launch(measure, work, points, ranks=2)[0]
    predicted = predict(work, singles)
    assert measured.keys() == predicted.keys() == {kind.name for kind in VARIANTS}
    for name, measured_points in singles.items():
        assert [(p["tokens"], p["microbatches"]) for p in measured_points] == points
        assert len(measured[name]) == len(predicted[name]) == 1
        assert min(measured[name][0], predicted[name][0]) > 0
