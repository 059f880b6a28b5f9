"""Weights edited by hand between steps: what is evaluated is what was written, or one clear error on every rank."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor

from odc_triton import MixedPrecisionPolicy, full_parameters, fully_shard, minibatch, publish, use_odc
from tests.support import ranks
from tests.support.refusals import caught, net
from tests.support.replicas import mesh_of

BF16 = torch.bfloat16
KEPT = "in a kept state dict"
VIEWED = "in views that are kept of a state dict"
X = torch.arange(12.0).view(3, 4) / 7


def _each(write: Callable[[torch.Tensor], object]) -> Callable[[nn.Module], None]:
    return lambda model: [write(p) for p in model.parameters()] and None


def _kept(keep: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[nn.Module], None]:
    """What is kept of a state dict is written once a read has found nothing written."""

    def write(model: nn.Module) -> None:
        kept = [keep(value) for value in model.state_dict().values()]
        _forward(model)
        model.reshard()  # FSDP2 leaves a root whole
        for value in kept:
            value.to_local().mul_(0.5) if isinstance(value, DTensor) else value.mul_(0.5)

    return write


def _in_a_layers_state_dict(model: nn.Module) -> None:
    state: dict[str, Any] = {}
    model[2].state_dict(destination=state)
    for value in state.values():
        value.to_local().mul_(0.5)


EDITS: dict[str, Callable[[nn.Module], None]] = {
    "in place": _each(lambda p: p.mul_(0.5)),
    "lerp": _each(lambda p: p.lerp_(torch.zeros_like(p), 0.5)),
    "one number": lambda model: model[2].bias.clamp_(max=-0.01),  # of which only one rank has rows
    "in a state dict": lambda model: [value.to_local().mul_(0.5) for value in model.state_dict().values()] and None,
    "in a layer's state dict": _in_a_layers_state_dict,
    KEPT: _kept(lambda value: value),
    VIEWED: _kept(lambda value: value.to_local()[:1]),
    "as it was": _each(lambda p: [p.mul_(0.5), p.mul_(2.0)]),
    "nothing": lambda model: None,
}
REFUSED = (
    "RuntimeError: .* was edited since it was published, and other ranks would read its former values: call "
    r"publish\(model\) on all ranks"
)


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
    """Outputs after two rounds of a step, an edit and a publication, and what plain torch has for those masters."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, cast_forward_inputs=True)
    model = fully_shard(_net(), mesh=mesh_of(mesh), mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    got, want = [], []
    for _ in range(2):
        _step(model, optimizer)
        with torch.no_grad():
            model(X)
            dist.barrier()  # no rank reads any more
            EDITS[edit](model)
            publish(model)
            got += [model.eval()(X), model(X)]
            plain = _net()
            for parameter, value in zip(plain.parameters(), model.parameters(), strict=True):
                parameter.copy_(value.full_tensor())
            want += [plain.to(dtype or torch.float32)(X.to(dtype or torch.float32))] * 2
    return got, want


@pytest.mark.slow
def test_an_evaluation_sees_what_was_published() -> None:
    edits = [edit for edit in EDITS if edit not in (KEPT, VIEWED)]  # which read, and here all write at once
    cases = [(edit, (2, 2), dtype) for edit in edits for dtype in (BF16, None)]
    for case, found in zip(cases, ranks.run_all(4, *((_evaluated, *case) for case in cases)), strict=True):
        for got, want in found:
            torch.testing.assert_close(got, want, rtol=0, atol=0, msg=lambda words, case=case: f"{case}: {words}")


def _bf16(mesh: tuple[int, ...], way: str = "fully_shard") -> nn.Module:
    how = {"mesh": mesh_of(mesh), "mp_policy": MixedPrecisionPolicy(param_dtype=BF16)}
    return fully_shard(_net(), **how) if way == "fully_shard" else use_odc(fsdp2(_net(), **how))


def _forward(model: nn.Module) -> None:
    with torch.no_grad(), torch.autocast("cpu", dtype=BF16):
        model(X)


def _minibatch(model: nn.Module) -> None:
    with minibatch(model, tokens=1):
        model(X).sum().backward()


def _in_threads(model: nn.Module) -> None:
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda _: _forward(model), range(3)))


READS: dict[str, Callable[[nn.Module], object]] = {
    "forward": _forward,
    "unshard": lambda model: model.unshard() or model.reshard(),
    "full_parameters": lambda model: dict(full_parameters(model)),
    "threads": _in_threads,
}


def _read(rank: int, world: int, edit: str, way: str, mesh: tuple[int, ...]) -> list[str]:
    """Rank 0 alone edits and reads: the errors of each read, before and after a publication."""
    model, said = _bf16(mesh, way), []
    reads = [read for name, read in READS.items() if (name, way) != ("threads", "use_odc")]  # FSDP2 has one at a time
    if rank == 0:
        with torch.no_grad():
            EDITS[edit](model)
        said = [caught(lambda read=read: read(model)) for read in reads]
    dist.barrier()
    publish(model)
    return said + [caught(lambda read=read: read(model)) for read in reads]


def test_a_read_of_unpublished_edits_is_refused() -> None:
    """Without another rank: each reads when it wants to."""
    edits = ("in place", "in a state dict", "in a layer's state dict", KEPT, VIEWED, "as it was")
    cases = [(edit, way, (2,)) for edit in edits for way in ("fully_shard", "use_odc")]
    cases += [(edit, "fully_shard", (2, 1)) for edit in ("in place", KEPT)]
    for case, (mine, other) in zip(cases, ranks.run_all(2, *((_read, *case) for case in cases)), strict=True):
        refused = case[0] != "as it was"
        assert len(mine) == 2 * len(other) > 0, case
        assert {*mine[len(other) :], *other} == {"nothing was raised"}, (case, mine, other)
        for text in mine[: len(other)]:
            assert re.match(REFUSED if refused else "nothing was raised", text), (case, text)


def _entered(rank: int, world: int, edit: str, dtype: Any) -> list[str]:
    """What minibatches say after an edit on rank 0, with replicas, and once it is published."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, cast_forward_inputs=True)
    model = fully_shard(_net(), mesh=mesh_of((2, 1)), mp_policy=policy)
    with torch.no_grad():
        if rank == 0:
            EDITS[edit](model)
    said = [caught(lambda: _minibatch(model))]
    publish(model)
    return [*said, caught(lambda: _minibatch(model))]


def test_replicas_refuse_unpublished_edits_at_the_entry_on_all_ranks() -> None:
    cases = [("in place", BF16), ("in place", None), ("as it was", BF16)]
    for case, found in zip(cases, ranks.run_all(2, *((_entered, *case) for case in cases)), strict=True):
        for first, second in found:
            if case[0] == "in place":
                assert re.match("MinibatchFailed.*rank 0: " + REFUSED, first), (case, first)
            else:
                assert first == "nothing was raised", (case, first)
            assert second == "nothing was raised", (case, second)


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
    words = "RuntimeError: 0.weight was edited in place while it was whole.*load them again.*sharded.*on all ranks"
    calls = [(_unsharded, backend) for backend in ("cpu", "cpu-sharded")]
    for said in chain.from_iterable(ranks.run_all(2, *calls)):
        assert [bool(re.search(words, text)) for text in said] == [True, True, False], said
        assert said[2] == "nothing was raised"


def _alone(rank: int, world: int) -> tuple[list[str], bool]:
    before = _net()[0].weight.detach()
    said = _unsharded(rank, world, "cpu")
    model = fully_shard(_net())
    model.unshard()
    with torch.no_grad():
        model[0].weight.mul_(0.5)
    model.reshard()
    return said, torch.equal(model[0].weight.full_tensor(), before * 0.5)


def test_one_rank_alone_may_edit_whole_weights() -> None:
    assert ranks.run(_alone, 1) == [(["nothing was raised"] * 3, True)]
