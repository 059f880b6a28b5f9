"""Weights edited by hand between steps: what is evaluated is what was written, or one clear error on every rank."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from odc_triton import MixedPrecisionPolicy, full_parameters, fully_shard, minibatch, publish
from tests.support import ranks
from tests.support.refusals import caught, net

BF16 = torch.bfloat16
X = torch.arange(12.0).view(3, 4) / 7


def _each(write: Callable[[torch.Tensor], object]) -> Callable[[nn.Module], None]:
    return lambda model: [write(p) for p in model.parameters()] and None


EDITS: dict[str, Callable[[nn.Module], None]] = {
    "in place": _each(lambda p: p.mul_(0.5)),
    "data": _each(lambda p: p.data.mul_(0.5)),
    "data copy": _each(lambda p: p.data.copy_(p.detach().clone() * 0.5)),
    "foreach": lambda model: torch._foreach_mul_(list(model.parameters()), 0.5),
    "lerp": _each(lambda p: p.lerp_(torch.zeros_like(p), 0.5)),
    "one number": lambda model: model[2].bias.clamp_(max=-0.01),  # of which only one rank has rows
    "nothing": lambda model: None,
}


def _net() -> nn.Module:
    model = net()
    model[2] = nn.Linear(6, 1)
    return model


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with minibatch(model, tokens=1) as mb:
        model(X).float().square().sum().backward()
    assert mb.index is not None
    optimizer.step()


def _evaluated(rank: int, world: int, edit: str, mesh: tuple[int, ...], dtype: Any) -> tuple[list, list]:
    """Outputs after two rounds of a step and an edit, and what plain torch has for those masters."""
    names = ("replicate", "shard")[-len(mesh) :]
    policy = MixedPrecisionPolicy(param_dtype=dtype, cast_forward_inputs=True)
    model = fully_shard(_net(), mesh=init_device_mesh("cpu", mesh, mesh_dim_names=names), mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    got, want = [], []
    for _ in range(2):
        _step(model, optimizer)
        with torch.no_grad():
            model(X)
            dist.barrier()  # no rank reads any more
            EDITS[edit](model)
            got += [model.eval()(X), model(X)]
            plain = _net()
            for parameter, value in zip(plain.parameters(), model.parameters(), strict=True):
                parameter.copy_(value.full_tensor())
            want += [plain.to(dtype or torch.float32)(X.to(dtype or torch.float32))] * 2
    return got, want


def _same(cases: list[tuple], world: int) -> None:
    for case, found in zip(cases, ranks.run_all(world, *((_evaluated, *case) for case in cases)), strict=True):
        for got, want in found:
            torch.testing.assert_close(got, want, rtol=0, atol=0, msg=lambda words, case=case: f"{case}: {words}")


def test_an_evaluation_sees_edits() -> None:
    _same([(edit, (2,), BF16) for edit in EDITS], 2)


@pytest.mark.slow
def test_an_evaluation_sees_edits_of_other_replicas() -> None:
    seen_alike = [edit for edit in EDITS if edit not in ("data", "data copy", "foreach")]
    _same([(edit, (2, 2), BF16) for edit in EDITS] + [(edit, (2, 2), None) for edit in seen_alike], 4)


def _walked(rank: int, world: int) -> tuple[str, bool]:
    """One rank alone may walk through the parameters, so an edit must have been published."""
    model = fully_shard(_net(), mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
    with torch.no_grad():
        model[0].weight.zero_()
    said = caught(lambda: dict(full_parameters(model)))
    publish(model)
    return said, bool((dict(full_parameters(model))["0.weight"] == 0).all())


def test_full_parameters_after_an_edit() -> None:
    for said, right in ranks.run(_walked, 2):
        assert re.search(r"RuntimeError: .*edited since they were published: call publish\(model\) on all", said), said
        assert right


def _unsharded(rank: int, world: int, backend: str) -> list[str]:
    model = fully_shard(_net(), backend=backend)

    def by_unshard() -> None:
        model.unshard()
        with torch.no_grad():
            model[0].weight.mul_(0.5)
        model.reshard()

    def by_a_forward() -> None:
        hook = model[0].register_forward_pre_hook(lambda *_: model[0].weight.mul_(0.5) is None or None)
        try:
            with torch.no_grad():
                model(X)
        finally:
            hook.remove()

    def read_only() -> None:
        model.unshard()
        model[0].weight.sum()
        model.reshard()
        with torch.no_grad():
            model(X)

    return [caught(action) for action in (by_unshard, by_a_forward, read_only)]


def test_an_edit_of_whole_weights_is_refused_on_every_rank() -> None:
    words = "RuntimeError: 0.weight was edited in place while it was whole.*sharded parameters.*on all ranks"
    calls = [(_unsharded, backend) for backend in ("cpu", "cpu-sharded")]
    for said in chain.from_iterable(ranks.run_all(2, *calls)):
        assert [bool(re.search(words, text)) for text in said] == [True, True, False], said
        assert said[2] == "nothing was raised"
