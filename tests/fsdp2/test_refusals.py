"""What `use_odc` refuses, and what a bridged model refuses: by name, with the remedy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from odc_triton import enable_split, minibatch, use_odc
from tests.support import ranks
from tests.support.bridged import LAYOUTS, Branches, made, sharded, train, under_odc
from tests.support.deadlines import LONG_S
from tests.support.refusals import caught


def _changed(change: Callable[[nn.Module], object]) -> nn.Module:
    change(model := sharded())
    return model


def _on_meta() -> nn.Module:
    with torch.device("meta"):
        model = Branches()
    LAYOUTS["blocks"](model)
    return model


def _float8() -> nn.Module:
    """FSDP2 gathers what the ranks make of their rows together: once per gather, so all must gather equally often."""
    model = sharded()
    rows = model.head.weight._local_tensor

    def scaled(mesh: Any) -> tuple[tuple[torch.Tensor], None]:
        torch.distributed.all_reduce(scale := rows.abs().max())
        return (rows / scale,), None

    rows.fsdp_pre_all_gather, rows.fsdp_post_all_gather = scaled, lambda *words, **options: None
    return model


def _two_meshes() -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    model, mesh = made("both branches", ""), init_device_mesh("cpu", (1, 2), mesh_dim_names=("other", "ep"))
    fully_shard(model.blocks[0], mesh=mesh["ep"])
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return model


def _tensor_parallel() -> nn.Module:
    mesh, model = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp")), Branches()
    parallelize_module(model.blocks[0].ways["odd"], mesh["tp"], ColwiseParallel())
    LAYOUTS["blocks"](model, mesh=mesh["dp"])
    return model


def _frozen_on_one() -> nn.Module:
    model = made("both branches", "")
    model.head.weight.requires_grad_(torch.distributed.get_rank() == 0)
    LAYOUTS["blocks"](model)
    return model


REFUSED = [
    (lambda: nn.Linear(2, 2), "TypeError: Linear is not sharded by torch's fully_shard: call it on the model"),
    (_frozen_on_one, "RanksDiffer: use_odc: rank "),
    (
        lambda: _changed(lambda model: model.blocks[0].set_all_reduce_hook(lambda gradient: None)),
        "NotImplementedError: unit blocks.0 has an all-reduce hook",
    ),
    (
        lambda: _changed(lambda model: model.blocks[1].set_custom_all_gather(object())),
        "NotImplementedError: unit blocks.1 communicates by object: leave out set_custom_all_gather",
    ),
    (
        lambda: _changed(lambda model: model.set_requires_gradient_sync(False)),
        "NotImplementedError: set_requires_gradient_sync(False) on unit the root",
    ),
    (_on_meta, "ValueError: head.weight is on the meta device: call to_empty"),
    (
        lambda: _changed(lambda model: model.set_gradient_divide_factor(3.0)),
        "ValueError: units have different gradient divide factors, ['3.0', 'None']: give divide_factor",
    ),
    (
        lambda: sharded(offload_policy=CPUOffloadPolicy(pin_memory=False)),
        "NotImplementedError: head.weight is offloaded to the CPU: leave out offload_policy",
    ),
    (_float8, "NotImplementedError: head.weight can't be gathered without the other ranks: its fsdp_pre_all_gather"),
    (_two_meshes, "on 2 meshes"),
    (
        lambda: sharded(mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))),
        "is replicated over 2 ranks and split over one: shard over at least two ranks",
    ),
    (_tensor_parallel, "Tensor and expert parallelism can't be combined with on-demand communication"),
]


def _refusals(rank: int, world: int) -> list[str]:
    return [caught(lambda make=make: use_odc(make(), timeout=LONG_S)) for make, _ in REFUSED]


def test_refused_by_name() -> None:
    for messages in ranks.run(_refusals, 2):
        for message, (_, wanted) in zip(messages, REFUSED, strict=True):
            assert wanted in message


def _then_trained(change: Callable[[nn.Module], object]) -> Callable[[nn.Module], None]:
    def misuse(model: nn.Module) -> None:
        change(model)
        train(model, [])

    return misuse


def _step_inside(model: nn.Module) -> None:
    with minibatch(model):
        torch.optim.SGD(model.parameters(), lr=0.1).step()


def _no_sync_in_the_backward(model: nn.Module) -> None:
    with minibatch(model):
        loss = model(torch.ones(3, 6)).sum()
        model.set_requires_gradient_sync(False)
        loss.backward()


def _written_inside(write: Callable[[nn.Parameter], object], model: nn.Module) -> None:
    """Between two microbatches. FSDP2's ranks are at the same microbatch then; here a peer may be at another."""
    weight = model.head.weight
    with minibatch(model):
        model(torch.ones(3, 6)).sum().backward()
        with torch.no_grad():
            write(weight)
        model(torch.ones(3, 6)).sum().backward()


def _steps_on_one(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, [(torch.ones(3, 6),)])
    if torch.distributed.get_rank() == 0:
        optimizer.step()
    train(model, [])


def _replaced(model: nn.Module) -> None:
    old = model.head.weight
    model.head.weight = nn.Parameter(distribute_tensor(torch.ones(5, 6), old.device_mesh, old.placements))
    train(model, [])


def _deterministic(model: nn.Module) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        train(model, [])
    finally:
        torch.use_deterministic_algorithms(False)


MISUSED = [
    (_step_inside, "optimizer step inside a minibatch"),
    (lambda model: model(torch.ones(3, 6)).sum().backward(), "backward outside of a minibatch: put it into `with"),
    (_no_sync_in_the_backward, "set_requires_gradient_sync(False) on unit"),
    (
        _then_trained(lambda model: model.head.weight.requires_grad_(False)),
        "head.weight was frozen after use_odc: choose what trains before it",
    ),
    *[
        (partial(_written_inside, write), "RuntimeError: head.weight was edited since it was published, and")
        for write in (lambda weight: weight.mul_(0.5), lambda weight: weight.to_local().mul_(0.5))
    ],
    (_replaced, "head.weight was replaced after use_odc by a DTensor of [5, 6] in torch.float32: assign a DTensor of"),
    (_steps_on_one, "RanksDiffer: "),
    (
        _then_trained(lambda model: model.set_gradient_divide_factor(2.0)),
        "set_gradient_divide_factor(2.0) came after use_odc: give it to use_odc",
    ),
    (_deterministic, "for exact sums shard it by odc_triton.fully_shard(model, exact=True)"),
    (
        lambda model: minibatch(model, split=object()).__enter__(),
        "this minibatch splits sequences, and the model is one of torch's fully_shard",
    ),
    (
        partial(enable_split, tokens=64),
        "was sharded by torch's fully_shard, and enable_split needs a model of odc_triton.fully_shard, which takes the",
    ),
    (use_odc, "ValueError: FSDPBranches trains by on-demand communication already, by use_odc"),
]


def _misuses(rank: int, world: int) -> list[str]:
    return [caught(lambda misuse=misuse: misuse(under_odc())) for misuse, _ in MISUSED]


def test_misuse_says_what_to_do() -> None:
    for messages in ranks.run(_misuses, 2):
        for message, (_, wanted) in zip(messages, MISUSED, strict=True):
            assert wanted in message
