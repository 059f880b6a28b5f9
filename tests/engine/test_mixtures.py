"""Mixtures of experts, whose experts are split over ranks by rows like any parameter, against one unsharded process."""

from __future__ import annotations

import pytest

from tests.support import slow
from tests.support.models import MIXTURES
from tests.support.parity import compare


@pytest.mark.parametrize(
    ("name", "world", "backend", "transform"),
    [
        ("deepseek-v3", 2, "cpu-sharded", "none"),
        *(slow(name, 1, "cpu", "none") for name in MIXTURES),
        *(slow(name, 2, backend, "none") for name in MIXTURES for backend in ("cpu", "cpu-sharded")),
        *(slow(name, 2, "cpu-interpreter", "none") for name in MIXTURES),
        # Of five experts, or six, the last rank has none.
        *(slow(name, 4, "cpu-sharded", "none") for name in MIXTURES),
        *(slow(name, 2, "cpu-sharded", each) for name in MIXTURES for each in ("checkpointing", "reentrant", "layers")),
    ],
)
def test_steps(name: str, world: int, backend: str, transform: str) -> None:
    compare(name, world, backend=backend, transform=transform, steps=3)


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXTURES)
def test_exact_sums(name: str) -> None:
    compare(name, 2, exact=True, steps=3)
