"""What is done to all shards at once: bitwise what a loop over parameters gives, in a fixed number of operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from odc_triton import MixedPrecisionPolicy, fully_shard, minibatch
from tests.support import ranks
from tests.support.models import CASES, build, microbatches
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


POLICIES = {
    "fp32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    "fp16": MixedPrecisionPolicy(param_dtype=torch.float16),
}


def _bitwise(rank: int, world: int, policy: str, masters: torch.dtype) -> list[str]:
    """Names of parameters that differ from what one operator for each of them gives."""
    torch.manual_seed(0)
    model = build("conv").to(DEVICE, masters)  # a scalar, an empty parameter, rows fewer than ranks
    model.offset = model.offset.to(POLICIES[policy].param_dtype or masters)
    fully_shard(model, backend=BACKEND, mp_policy=POLICIES[policy])
    engine, case = model._odc_engine, CASES["conv"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    differ = []
    reduce = engine._reduce

    def looked_at(touched: set[int]) -> None:
        want = {}
        for parameter in engine.parameters:
            whole = parameter.shard.gradient_shard.clone()
            want[parameter.name] = whole.div_(world).to(parameter.shard.master.dtype)
        reduce(touched)
        for parameter in engine.parameters:
            got = parameter.sharded.grad.to_local()
            if not torch.equal(got, want[parameter.name]):
                differ.append(f"gradient of {parameter.name}")

    engine._reduce = looked_at
    for step in range(2):
        with minibatch(model):
            for batch in microbatches("conv", [rank + 2], seed=step):
                inputs = tuple(v.to(DEVICE, masters) if v.is_floating_point() else v.to(DEVICE) for v in batch)
                case.loss(model, inputs).backward()
        optimizer.step()
        for parameter in engine.parameters:
            own = parameter.shard.compute_shards[rank]
            if own.numel() and not torch.equal(own, parameter.shard.master.to(own.dtype).view_as(own)):
                differ.append(f"shard of {parameter.name}")
    engine._prepare()
    differ += [f"old gradient of {p.name}" for p in engine.parameters if rank == 0 and p.shard.gradient_shard.any()]
    return differ


@pytest.mark.filterwarnings("ignore:.*small updates are lost")
def test_bitwise_as_parameter_by_parameter() -> None:
    cases = [("fp32", torch.float32), ("bf16", torch.float32), ("fp16", torch.bfloat16)]
    assert ranks.run_all(3, *((_bitwise, *case) for case in cases)) == [[[]] * 3] * len(cases)
