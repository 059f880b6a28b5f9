"""Each rank trains adapters of its own, at its own pace, over one base: with the bits of single processes."""

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
from odc_triton import fully_shard, minibatch, own_mesh, repeating, serving
from odc_triton.engine.api import engine_of
from tests.support import ranks, slow
from tests.support.families import with_lora
from tests.support.models import CASES, build, microbatches
from tests.support.parity import TRANSFORMS

pytestmark = [
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),  # reentrant, without a graph
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),  # compiled
]
WORLD = 3
Seen = dict[str, torch.Tensor]


def _compiled(model: nn.Module) -> nn.Module:
    for layer in model.model.layers:
        layer.mlp.compile(backend="aot_eager", dynamic=True)
    return model


# How the base is changed before it gets adapters.
KINDS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": TRANSFORMS["none"],
    "replaced": TRANSFORMS["layers"],
    "nf4": TRANSFORMS["nf4"],
    "checkpointing": TRANSFORMS["checkpointing"],
    "reentrant": TRANSFORMS["reentrant"],
    "compiled": _compiled,
}
# Of adapters in ignored_params: is there a minibatch?
WAYS = ("no minibatch", "minibatch", "borrowed")


def _model(kind: str, rank: int) -> nn.Module:
    """Another LoRA rank on each."""
    return with_lora(KINDS[kind](build("qwen2")), targets=["q_proj", "down_proj"], seed=rank, r=2 + rank)


def _trained(model: nn.Module, rank: int, scope: Callable[[], Any]) -> Seen:
    """Losses, adapters and the optimizer's states, of other lengths, microbatches, steps and learning rates by rank."""
    seen: Seen = {}
    adapters = {key: each for key, each in model.named_parameters() if each.requires_grad}
    optimizer = torch.optim.AdamW(adapters.values(), lr=1e-2 / (1 + rank))
    for step in range(2 + rank):
        with scope():
            for number, batch in enumerate(microbatches("qwen2", [5 + rank, 9, 2][: 3 - rank], seed=10 * rank + step)):
                loss = CASES["qwen2"].loss(model, batch) / 10
                loss.backward()
                seen[f"loss {step}, {number}"] = loss.detach()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        seen["evaluated"] = CASES["qwen2"].loss(model, batch)
    seen |= {key: whole(each).clone() for key, each in adapters.items()}
    states = {key: optimizer.state[each] for key, each in adapters.items()}
    return seen | {f"{key}, {what}": whole(each[what]) for key, each in states.items() for what in each}


def _runs(rank: int, world: int, cases: list[tuple[str, str, str]]) -> list[tuple[Seen, Seen]]:
    found = []
    for kind, way, backend in cases:
        torch._dynamo.reset()
        want = _trained(_model(kind, rank), rank, nullcontext)
        base = model = _model(kind, rank)
        if way == "borrowed":
            base = fully_shard(KINDS[kind](build("qwen2")).requires_grad_(False), backend=backend)
            model = fully_shard(model, mesh=own_mesh([rank]), base=base, backend=backend)
        else:
            fully_shard(model, backend=backend, ignored_params={p for p in model.parameters() if p.requires_grad})
        with serving(base):
            has_one = way != "no minibatch"
            found.append((_trained(model, rank, partial(minibatch, model, tokens=1) if has_one else nullcontext), want))
    return found


def compare(what: str, got: Seen, want: Seen, tolerance: float) -> None:
    assert got.keys() == want.keys()
    for key, value in want.items():
        torch.testing.assert_close(
            got[key], value, rtol=tolerance, atol=tolerance / 10, msg=lambda m, key=key: f"{what}, {key}: {m}"
        )


FAST = [("plain", "no minibatch", "cpu-sharded"), ("plain", "borrowed", "cpu-sharded")]
REST = [each for each in product(KINDS, WAYS, ("cpu", "cpu-sharded")) if each not in FAST]


@pytest.mark.parametrize("cases", [FAST, slow(REST)], ids=["few", "all"])
def test_many_runs(cases: list[tuple[str, str, str]]) -> None:
    for of_rank in ranks.run(_runs, WORLD, cases):
        for case, (got, want) in zip(cases, of_rank, strict=True):
            assert len(want) > 30
            # Replaced heads add in another order where weights are in shards.
            tolerance = 1e-5 if case[0] == "replaced" else 0.0
            compare(f"{case}", got, want, tolerance)


# ---------------------------------------------------------------------- groups


def _group_run(model: nn.Module, group: list[int], mine: list[int], scope: Callable[[], Any]) -> Seen:
    """Adapters after steps of which a group has as many as ranks, of microbatches `mine`, one for each of its ranks."""
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=1.0)

    def minibatch_of(step: int) -> None:
        with scope():
            for number in mine:
                for batch in microbatches("qwen2", [5, 9][: 1 + number % 2], seed=10 * group[number] + step):
                    (CASES["qwen2"].loss(model, batch) / 40).backward()

    for step in range(len(group)):
        repeating(partial(minibatch_of, step))  # exact sums adapt their scales
        optimizer.step()
        optimizer.zero_grad()
    return {key: whole(each).clone() for key, each in model.named_parameters() if each.requires_grad}


def _groups(rank: int, world: int, groups: list[list[int]], backend: str, exact: bool) -> tuple[Seen, Seen, dict]:
    """The groups train in turn, which could not end if one waited for another."""
    base = fully_shard(build("qwen2").requires_grad_(False), backend=backend)
    group = next(each for each in groups if rank in each)
    store, place = dist.distributed_c10d._get_default_store(), groups.index(group)
    engine = engine_of(base)
    before = engine.barrier.passed, engine.publication.number
    with serving(base):
        for number in range(place):
            store.wait([f"group {number} has ended"])
        model = fully_shard(_model("plain", 0), mesh=own_mesh(group), base=base, backend=backend, exact=exact)
        ours = engine_of(model)
        first = ours.barrier.passed, ours.publication.number
        got = _group_run(model, group, [group.index(rank)], partial(minibatch, model, tokens=1))
        counts = {
            "barriers": ours.barrier.passed - first[0],
            "publications": ours.publication.number - first[1],
            "of the base": (engine.barrier.passed - before[0], engine.publication.number - before[1]),
            "waits": {each.label for each in ours.events.drain() if each.kind == "wait"},
        }
        if rank == group[0]:
            store.set(f"group {place} has ended", "")
        everything = [*range(len(group))]
        if exact:
            alone = fully_shard(_model("plain", 0), mesh=own_mesh([rank]), base=base, backend=backend, exact=True)
            want = _group_run(alone, group, everything, partial(minibatch, alone, tokens=1))
        else:
            want = _group_run(_model("plain", 0), group, everything, nullcontext)
    return got, want, counts


SPLITS = [([[0, 1, 2], [3]], "cpu-sharded", False), slow([[3], [2, 0, 1]], "cpu", True)]
SPLITS += [slow([[2, 3], [0, 1]], backend, exact) for backend in ("cpu", "cpu-sharded") for exact in (False, True)]


@pytest.mark.parametrize(("groups", "backend", "exact"), SPLITS)
def test_groups(groups: list[list[int]], backend: str, exact: bool) -> None:
    for rank, (got, want, counts) in enumerate(ranks.run(_groups, 4, groups, backend, exact)):
        steps = len(next(each for each in groups if rank in each))
        if not exact:  # whose minibatches may be run again
            assert counts["barriers"] == 2 * steps
            assert all("minibatch" in label for label in counts["waits"]), counts["waits"]
        assert counts["publications"] == steps
        assert counts["of the base"] == (0, 0)
        # fp32 sums in another order; exact ones have the same bits however many ranks add.
        compare(f"rank {rank}", got, want, 0.0 if exact else 1e-5)
