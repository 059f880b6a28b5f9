"""Four processes, also all on one GPU: what only more than two ranks show, and where time-slicing hurts most."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.marks import MARKS, ONE_GPU
from tests.gpu.test_cuda_engine import _bf16, _compare
from tests.gpu.test_cuda_heap import ROUNDS, _contend, _integers, _tokens
from tests.support import ranks

pytestmark = MARKS
WORLD = 4


@ONE_GPU
def test_additions_are_exact(one_gpu: bool) -> None:
    # Integers below 2^24: sums are exact in any order, so a lost addition shows.
    scattered = (torch.arange(1001 * 64).view(1001, 64) % 7).float() * ROUNDS * WORLD
    multiplied = sum(ROUNDS * _integers(64, 250, rank).T @ _integers(64, 256, rank + 10) for rank in range(WORLD))
    embedded = torch.zeros(97, 64)
    for rank in range(WORLD):
        embedded.index_add_(0, _tokens(rank), ROUNDS * _integers(500, 64, rank + 20))
    for got_scattered, got_multiplied, got_embedded in ranks.run(_contend, WORLD, one_gpu):
        assert torch.equal(got_scattered, scattered)
        assert torch.equal(got_multiplied, multiplied)
        assert torch.equal(got_embedded, embedded)


@pytest.mark.parametrize("transform", ["none", "layers", "staged"])
@ONE_GPU
def test_ten_steps(transform: str, one_gpu: bool) -> None:
    _compare("qwen2" if transform == "none" else "qwen3", WORLD, transform, one_gpu=one_gpu)


def test_steady_state_allocates_nothing() -> None:
    for error, early, late, _ in ranks.run(_bf16, WORLD):
        assert error <= 3e-2  # as with two ranks: 8 bits of mantissa between autocast and cast inputs
        assert late == early
