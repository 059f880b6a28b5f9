"""Four processes, also all on one GPU: what only more than two ranks show, and where time-slicing hurts most."""

from __future__ import annotations

import pytest

from tests.gpu.marks import MARKS, ONE_GPU
from tests.gpu.test_cuda_engine import _bf16, _compare
from tests.gpu.test_cuda_heap import check_additions
from tests.support import ranks

pytestmark = MARKS
WORLD = 4


@ONE_GPU
def test_additions_are_exact(one_gpu: bool) -> None:
    check_additions(WORLD, one_gpu=one_gpu)


@pytest.mark.parametrize("transform", ["none", "layers", "staged"])
@ONE_GPU
def test_ten_steps(transform: str, one_gpu: bool) -> None:
    _compare("qwen2" if transform == "none" else "qwen3", WORLD, transform, one_gpu=one_gpu)


def test_steady_state_allocates_nothing() -> None:
    for error, early, late, _ in ranks.run(_bf16, WORLD):
        assert error <= 3e-2  # as with two ranks: 8 bits of mantissa between autocast and cast inputs
        assert late == early
