"""Ranks, or groups of them, train adapters of their own at their own pace over one base: with the results of single
processes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bench.whole import whole
from odc_triton import fully_shard, minibatch, own_mesh, serving
from odc_triton.engine.api import engine_of
from tests.support import ranks, slow
from tests.support.adapters import adapted, adapters, frozen, train
from tests.support.models import CASES, microbatches
from tests.support.parity import TRANSFORMS
from tests.support.replicas import mesh_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),  # reentrant, without a graph
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),  # compiled
]
Seen = dict[str, torch.Tensor]


def _compiled(model: nn.Module) -> nn.Module:
    for layer in model.model.layers:
        layer.mlp.compile(backend="aot_eager", dynamic=True)
    return model


# What is done to the model before it gets adapters, and what the results may differ by: replaced heads add in another
# order where weights are in shards.
KINDS = {name: (TRANSFORMS[name], 0.0) for name in ("none", "nf4", "checkpointing", "reentrant")}
KINDS |= {"compiled": (_compiled, 0.0), "layers": (TRANSFORMS["layers"], 1e-5)}
WAYS = ("no minibatch", "minibatch", "borrowed")  # the first two: adapters in ignored_params


def _trained(model: nn.Module, rank: int, scope: Callable[[], Any]) -> Seen:
    """Losses, adapters, the optimizer's states: of another learning rate, lengths, microbatches and steps by rank."""
    optimizer, seen = torch.optim.AdamW(adapters(model).values(), lr=1e-2 / (1 + rank)), {}
    for step in range(2 + rank):
        batches = microbatches("qwen2", [5 + rank, 9, 2][: 3 - rank], seed=10 * rank + step)
        seen |= {f"loss {step}, {n}": each for n, each in enumerate(train(model, optimizer, batches, scope))}
    with torch.no_grad():
        seen["evaluated"] = CASES["qwen2"].loss(model, batches[0])
    for key, each in adapters(model).items():
        seen |= {f"{key}, {what}": whole(value) for what, value in optimizer.state[each].items()}
        seen[key] = whole(each).clone()
    return seen


def _runs(rank: int, world: int, cases: list[tuple[str, str, str]]) -> list[tuple[Seen, Seen]]:
    found = []
    for kind, way, backend in cases:
        torch._dynamo.reset()
        made = partial(adapted, KINDS[kind][0], seed=rank, r=2 + rank)
        want, base = _trained(made(), rank, nullcontext), (model := made())
        if way == "borrowed":
            base = fully_shard(frozen(KINDS[kind][0]), backend=backend)
            fully_shard(model, mesh=own_mesh([rank]), base=base, backend=backend)
        else:
            fully_shard(model, backend=backend, ignored_params={*adapters(model).values()})
        with serving(base):
            scope = nullcontext if way == "no minibatch" else partial(minibatch, model, tokens=1)
            found.append((_trained(model, rank, scope), want))
    return found


def _require(what: object, got: Seen, want: Seen, tolerance: float) -> None:
    assert len(want) >= 8
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance / 10, msg=lambda m: f"{what}: {m}")


FAST = [("none", "no minibatch", "cpu-sharded"), ("none", "borrowed", "cpu-sharded")]
REST = [each for each in product(KINDS, WAYS, ("cpu", "cpu-sharded")) if each not in FAST]


@pytest.mark.parametrize("cases", [FAST, slow(REST)], ids=["few", "all"])
def test_many_runs(cases: list[tuple[str, str, str]]) -> None:
    for of_rank in ranks.run(_runs, 3, cases):
        for case, (got, want) in zip(cases, of_rank, strict=True):
            _require(case, got, want, KINDS[case[0]][1])


def _group_run(model: nn.Module, group: list[int], mine: list[int], scope: Callable[[], Any]) -> Seen:
    """Adapters after as many steps as the group has ranks, on the microbatches of those in `mine`."""
    optimizer = torch.optim.SGD(adapters(model).values(), lr=1.0)
    for step in range(len(group)):
        seeds = [(number, 10 * group[number] + step) for number in mine]
        train(model, optimizer, [b for n, seed in seeds for b in microbatches("qwen2", [5, 9][: 1 + n], seed)], scope)
    return {key: whole(each).clone() for key, each in adapters(model).items()}


def _groups(rank: int, world: int, groups: list[list[int]], how: dict, shape: tuple) -> tuple[Seen, Seen, dict]:
    """The groups train in turn, which would not end if one waited for another."""
    base = fully_shard(frozen(), mesh=mesh_of(shape), backend=how["backend"])
    group = next(each for each in groups if rank in each)
    store, place, of_base = dist.distributed_c10d._get_default_store(), groups.index(group), engine_of(base)
    before = of_base.barrier.passed, of_base.publication.number
    with serving(base):
        store.wait([f"group {number} has ended" for number in range(place)])
        model = fully_shard(adapted(), mesh=own_mesh(group), base=base, **how)
        ours = engine_of(model)
        first = ours.barrier.passed, ours.publication.number
        got = _group_run(model, group, [group.index(rank)], partial(minibatch, model, tokens=1))
        counts = {
            "steps": (ours.barrier.passed - first[0], ours.publication.number - first[1]),
            "of the base": (of_base.barrier.passed - before[0], of_base.publication.number - before[1]),
            "waits": {each.label for each in ours.events.drain() if each.kind == "wait"},
        }
        if rank == group[0]:
            store.set(f"group {place} has ended", "")
        alone, scope = adapted(), nullcontext
        if how["exact"]:
            scope = partial(minibatch, fully_shard(alone, mesh=own_mesh([rank]), base=base, **how), tokens=1)
        return got, _group_run(alone, group, [*range(len(group))], scope), counts


HOWS = [{"backend": backend, "exact": exact} for backend in ("cpu-sharded", "cpu") for exact in (False, True)]
SPLITS = [slow([[2, 3], [0, 1]], how, (4,)) for how in HOWS] + [slow([[3], [2, 0, 1]], HOWS[1], (4,))]


@pytest.mark.parametrize(
    ("groups", "how", "shape"), [([[0, 1, 2], [3]], HOWS[0], (4,)), *SPLITS, slow([[0, 3], [1, 2]], HOWS[0], (2, 2))]
)
def test_groups(groups: list[list[int]], how: dict, shape: tuple) -> None:
    for rank, (got, want, counts) in enumerate(ranks.run(_groups, 4, groups, how, shape)):
        steps = len(next(each for each in groups if rank in each))
        assert counts["of the base"] == (0, 0)
        if not how["exact"]:  # whose minibatches may be run again
            assert counts["steps"] == (2 * steps, steps)
            assert all("minibatch" in each or each.startswith("lock of") for each in counts["waits"]), counts["waits"]
        # fp32 sums in another order; exact ones have the same bits however many ranks add.
        _require(f"rank {rank}", got, want, 0.0 if how["exact"] else 1e-5)
