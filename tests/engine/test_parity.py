"""ODC against one unsharded process on the union of all ranks' microbatches."""

from __future__ import annotations

import pytest

from tests.support import slow
from tests.support.models import CASES, MIXTURES
from tests.support.parity import compare_each

STEPS = 3


HALVES = [*CASES][::2], [*CASES][1::2]


@pytest.mark.parametrize(
    ("backend", "names", "world", "steps"),
    [
        ("cpu", HALVES[1], 3, STEPS),
        ("cpu-sharded", HALVES[0], 3, STEPS),
        slow("cpu", HALVES[0], 3, STEPS),
        slow("cpu-sharded", [*CASES], 4, 10),
    ],
)
def test_steps(backend: str, names: list[str], world: int, steps: int) -> None:
    """By "cpu-sharded", shards lie apart and whole parameters are gathered ahead and freed: CUDA's way."""
    compare_each([(name, "none") for name in names], world, backend=backend, steps=steps)


@pytest.mark.parametrize("style", ["root", "bottom-up"])
def test_gathered_at_once(style: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated streams that do everything early; everywhere else they are late. `make test-slow` has all early."""
    monkeypatch.setenv("ODC_SIMULATED_STREAMS", "early")
    runs = [("qwen2", transform) for transform in ("none", "reentrant", "layers")]
    compare_each(runs, 2, style=style, backend="cpu-sharded", steps=STEPS)


@pytest.mark.parametrize(
    ("transforms", "options"),
    [
        (("none",), {"kind": "foreach"}),
        (("none",), {"style": "bottom-up"}),
        (("none",), {"style": "bottom-up", "backend": "cpu-sharded"}),
        (("frozen", "checkpointing", "reentrant"), {}),
        (("frozen+reentrant", "checkpointing"), {"backend": "cpu-sharded"}),
    ],
    ids=str,
)
def test_transformed(transforms: tuple[str, ...], options: dict[str, str]) -> None:
    compare_each([("qwen2", transform) for transform in transforms], 2, steps=2, **options)


@pytest.mark.parametrize(("backend", "names"), [("cpu", HALVES[0]), ("cpu-sharded", HALVES[1])])
def test_replaced_layers(backend: str, names: list[str]) -> None:
    compare_each([(name, "layers") for name in names], 2, backend=backend, steps=2)


def test_replaced_and_transformed() -> None:
    runs = [("qwen3", transform) for transform in ("frozen+checkpointing+layers", "reentrant+layers")]
    compare_each(runs, 3, backend="cpu-sharded", steps=2)


@pytest.mark.parametrize(
    ("names", "world", "backend", "transforms"),
    [
        (["deepseek-v3"], 2, "cpu-sharded", ["none"]),
        slow([*MIXTURES], 2, "cpu", ["layers"]),
        slow([*MIXTURES], 4, "cpu-sharded", ["none"]),
    ],
)
def test_mixtures(names: list[str], world: int, backend: str, transforms: list[str]) -> None:
    """Experts are split over ranks by rows like any parameter: of five, or six, the last of four ranks has none."""
    compare_each([(name, each) for name in names for each in transforms], world, backend=backend, steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("transform", ["direct", "gathered", "staged", "checkpointing+direct+chunks", "frozen+staged"])
def test_replaced_layers_by_kernels(transform: str) -> None:
    """All of a model's products, in Triton's interpreter: few steps, as it is slow."""
    compare_each([("qwen3", transform)], 2, backend="cpu-interpreter", steps=2)
