"""ODC against one unsharded process on the union of all ranks' microbatches."""

from __future__ import annotations

import pytest

from tests.support import slow
from tests.support.models import CASES
from tests.support.parity import compare

STEPS = 3


@pytest.mark.parametrize(
    ("name", "backend", "world", "steps"),
    [
        *((name, backend, 3, STEPS) for name in CASES for backend in ("cpu", "cpu-apart")),
        *((name, backend, 1, STEPS) for name, backend in (("gpt2-tied", "cpu"), ("conv", "cpu-apart"))),
        *(slow(name, backend, 4, 10) for name in CASES for backend in ("cpu", "cpu-apart")),
    ],
)
def test_steps(name: str, backend: str, world: int, steps: int) -> None:
    """By "cpu-apart", shards lie apart and whole parameters are gathered ahead and freed: CUDA's way."""
    compare(name, world, backend=backend, steps=steps)


@pytest.mark.parametrize(
    ("name", "world", "style", "transform"),
    [
        *(("qwen2", 2, "root", transform) for transform in ("none", "reentrant", "layers")),
        ("llama", 3, "bottom-up", "none"),
    ],
)
def test_gathered_at_once(name: str, world: int, style: str, transform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated streams that do everything early; everywhere else they are late. `make test-slow` has all early."""
    monkeypatch.setenv("ODC_SIMULATED_STREAMS", "early")
    compare(name, world, style=style, transform=transform, backend="cpu-apart", steps=STEPS)


@pytest.mark.parametrize(
    ("world", "options"),
    [
        (3, {"kind": "plain"}),
        (3, {"kind": "foreach"}),
        (2, {"style": "bottom-up"}),
        (2, {"style": "bottom-up", "backend": "cpu-apart"}),
        (2, {"transform": "frozen"}),
        (2, {"transform": "checkpointing"}),
        (2, {"transform": "reentrant"}),
        (2, {"transform": "frozen+reentrant", "backend": "cpu-apart"}),
        (2, {"transform": "checkpointing", "backend": "cpu-apart"}),
    ],
    ids=str,
)
def test_transformed(world: int, options: dict[str, str]) -> None:
    compare("qwen2", world, steps=STEPS, **options)


@pytest.mark.parametrize(
    ("name", "backend"),
    [(name, ("cpu", "cpu-apart")[number % 2]) for number, name in enumerate(CASES)]
    + [slow(name, ("cpu-apart", "cpu")[number % 2]) for number, name in enumerate(CASES)],
)
def test_replaced_layers(name: str, backend: str) -> None:
    """Each model on one backend; slowly on the other too."""
    compare(name, 2, transform="layers", backend=backend, steps=STEPS)


@pytest.mark.parametrize(
    ("transform", "style"),
    [("frozen+checkpointing+layers", "root"), ("reentrant+layers", "root"), ("layers", "bottom-up")],
)
def test_replaced_and_transformed(transform: str, style: str) -> None:
    compare("qwen3", 3, style=style, transform=transform, backend="cpu-apart", steps=STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("transform", ["direct", "gathered", "staged", "checkpointing+direct", "frozen+staged"])
def test_replaced_layers_by_kernels(transform: str) -> None:
    """All of a model's products, in Triton's interpreter: few steps, as it is slow."""
    compare("qwen3", 2, transform=transform, backend="cpu-interpreter", steps=2)
