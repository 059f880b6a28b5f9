"""What is done to all shards at once: bitwise what a loop over parameters gives, in a fixed number of operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from odc_triton import MixedPrecisionPolicy, fully_shard, minibatch
from tests.support.place import DEVICE, INTERPRETED

BACKEND = "cpu-sharded" if INTERPRETED else "cuda"
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]


class _Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **kwargs or {})


def _calls_between_microbatches(layers: int, **policy: torch.dtype) -> dict[str, list[str]]:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)))
    fully_shard(model, backend=BACKEND, mp_policy=MixedPrecisionPolicy(**policy))
    model.set_gradient_divide_factor(3.0)
    engine, calls = model._odc_engine, {}
    for _ in range(2):  # the first one makes the gradients' DTensors
        model.zero_grad()
        with minibatch(model):
            model(torch.randn(2, 8, device=DEVICE)).sum().backward()
        with _Calls() as calls["landing"]:
            engine._reduce(set(range(len(engine.parameters))))
    model.zero_grad()
    with _Calls() as calls["entering"]:
        engine._prepare()
    with _Calls() as calls["publishing"]:
        engine.publish()
    return {name: mode.names for name, mode in calls.items()}


def test_as_many_operators_for_many_parameters_as_for_few() -> None:
    few, many = (_calls_between_microbatches(layers, param_dtype=torch.bfloat16) for layers in (2, 7))
    assert few == many
    assert many["publishing"] == ["_foreach_copy_"]
    assert sorted(many["entering"]) == ["_foreach_copy_", "_foreach_zero_"]
    assert many["landing"] == ["_foreach_div_"]


def test_nothing_is_copied_where_masters_are_what_is_read() -> None:
    assert _calls_between_microbatches(3)["publishing"] == []
