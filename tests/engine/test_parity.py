"""ODC against one unsharded process on the union of all ranks' microbatches."""

from __future__ import annotations

import pytest

from tests.support import slow
from tests.support.models import CASES
from tests.support.parity import compare


@pytest.fixture(params=[4, slow(10)])
def steps(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.mark.parametrize(
    ("backend", "world"),
    [
        *(("cpu", 1), ("cpu", 3), ("cpu-apart", 3)),
        *(slow(*case) for case in (("cpu", 2), ("cpu", 4), ("cpu-apart", 1))),
    ],
)
@pytest.mark.parametrize("name", CASES)
def test_steps(name: str, backend: str, world: int, steps: int) -> None:
    """By "cpu-apart", shards lie apart and whole parameters are gathered ahead and freed: CUDA's way."""
    compare(name, world, backend=backend, steps=steps)


@pytest.mark.parametrize("transform", ["checkpointing", "reentrant", "frozen"])
def test_gathered_and_transformed(transform: str, steps: int) -> None:
    compare("qwen2", 2, transform=transform, backend="cpu-apart", steps=steps)


def test_gathered_bottom_up(steps: int) -> None:
    compare("qwen2", 2, style="bottom-up", backend="cpu-apart", steps=steps)


@pytest.mark.parametrize(
    ("name", "world", "style", "transform"),
    [
        *(("qwen2", 2, "root", transform) for transform in ("none", "reentrant", "layers")),
        ("llama", 3, "root", "none"),
        ("qwen2", 2, "bottom-up", "none"),
    ],
)
def test_gathered_at_once(name: str, world: int, style: str, transform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated streams that do everything early; everywhere else they are late. `make test-slow` has all early."""
    monkeypatch.setenv("ODC_SIMULATED_STREAMS", "early")
    compare(name, world, style=style, transform=transform, backend="cpu-apart", steps=3)


@pytest.mark.parametrize("kind", ["plain", "foreach"])
def test_optimizers(kind: str, steps: int) -> None:
    compare("qwen2", 3, kind=kind, steps=steps)


def test_bottom_up(steps: int) -> None:
    compare("qwen2", 2, style="bottom-up", steps=steps)


@pytest.mark.parametrize("transform", ["checkpointing", "reentrant", "frozen"])
def test_transformed(transform: str, steps: int) -> None:
    compare("qwen2", 2, transform=transform, steps=steps)


@pytest.mark.parametrize(
    ("name", "backend"),
    [(name, ("cpu", "cpu-apart")[number % 2]) for number, name in enumerate(CASES)]
    + [slow(name, ("cpu-apart", "cpu")[number % 2]) for number, name in enumerate(CASES)],
)
def test_replaced_layers(name: str, backend: str, steps: int) -> None:
    """Each model on one backend; slowly on the other too."""
    compare(name, 2, transform="layers", backend=backend, steps=steps)


@pytest.mark.parametrize("transform", ["checkpointing+layers", "reentrant+layers", "frozen+layers"])
def test_replaced_and_transformed(transform: str, steps: int) -> None:
    compare("qwen3", 3, transform=transform, backend="cpu-apart", steps=steps)


def test_replaced_bottom_up(steps: int) -> None:
    compare("qwen3", 2, style="bottom-up", transform="layers", backend="cpu-apart", steps=steps)


@pytest.mark.slow
@pytest.mark.parametrize("transform", ["direct", "gathered", "staged", "checkpointing+direct", "frozen+staged"])
def test_replaced_layers_by_kernels(transform: str) -> None:
    """All of a model's products, in Triton's interpreter: few steps, as it is slow."""
    compare("qwen3", 2, transform=transform, backend="cpu-interpreter", steps=2)
