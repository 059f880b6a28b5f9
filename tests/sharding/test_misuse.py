"""What can't work is refused, with the value and the remedy, and on every rank."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

from odc_triton import MixedPrecisionPolicy, begin_minibatch, end_minibatch, fully_shard, minibatch
from tests.support import ranks
from tests.support.deadlines import LONG_S
from tests.support.refusals import caught, net


def _options(rank: int, world: int) -> None:
    def of(value: torch.Tensor) -> nn.Module:
        model = net()
        model[0].weight = nn.Parameter(value, requires_grad=value.is_floating_point())
        return model

    def tensor_parallel() -> nn.Module:
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
        return of(distribute_tensor(torch.zeros(6, 4), mesh, [Replicate()]))

    def hooked() -> nn.Module:
        model = net()
        model[0].weight.register_post_accumulate_grad_hook(lambda _: None)
        return model

    def mesh_of(*names: str) -> object:
        return init_device_mesh("cpu", (world, 1)[: len(names)], mesh_dim_names=names)

    def in_two_models() -> None:
        first = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])})
        first.forward = lambda x: x
        shared = first["blocks"][0]
        fully_shard(nn.Sequential(first))
        fully_shard(nn.Sequential(shared, nn.Linear(4, 4)))

    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: fully_shard([net(), "net"]), "TypeError: .*the list holds a str"),
        (lambda: fully_shard("model"), "TypeError.*str"),
        (lambda: fully_shard(nn.ModuleList([net()])), "ValueError: .*containers .*: call it on the parent"),
        (lambda: fully_shard(fully_shard(net())), "ValueError.*sharded already"),
        (lambda: fully_shard(fully_shard(net())[0]), "ValueError: weight is a DTensor.*plain model"),
        (in_two_models, "ValueError: 0 belongs to another sharded model.*one engine only"),
        (lambda: fully_shard(of(torch.zeros(6, 4).byte())), r"ValueError: 0\.weight is .*uint8.*ignored_params"),
        (lambda: fully_shard(tensor_parallel()), "ValueError: 0.weight is a DTensor.*plain model"),
        (
            lambda: fully_shard(of(TwoTensor(torch.zeros(6, 4), torch.zeros(6, 4)))),
            r"ValueError: 0\.weight is a TwoTensor, a tensor subclass.*ignored_params",
        ),
        (lambda: fully_shard(nn.Sequential(nn.LazyLinear(3))), "ValueError.*lazy parameter.*run one forward"),
        (lambda: fully_shard(hooked()), "ValueError: 0.weight has gradient hooks.*after the minibatch"),
        (lambda: fully_shard(net(), mesh=mesh_of("dp", "tp")), r"NotImplementedError.*2 dimensions.*mesh\['dp'\]"),
        (lambda: fully_shard(net(), mesh=init_device_mesh("cpu", (world, 1, 1))), "ValueError: .*1D or 2D"),
        (lambda: fully_shard(net(), mesh=mesh_of("shard", "replicate")), "NotImplementedError.*swap the dimensions"),
        (lambda: fully_shard(net(), mesh=dist.group.WORLD), "TypeError.*give a DeviceMesh"),
        (
            lambda: fully_shard(net(), shard_placement_fn=lambda p: Shard(1)),
            r"NotImplementedError: .*1.* for 0\.weight",
        ),
        (lambda: fully_shard(net(), offload_policy=CPUOffloadPolicy()), "NotImplementedError: offload_policy"),
        (lambda: fully_shard(net(), dp_mesh_dims=("dp",)), "NotImplementedError: dp_mesh_dims is not"),
        (lambda: fully_shard(net(), mp_policy=torch.bfloat16), "TypeError.*give a MixedPrecisionPolicy"),
        (
            lambda: fully_shard(net(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.int8)),
            r"ValueError.*param_dtype=torch\.int8.*bfloat16",
        ),
        (lambda: fully_shard(net(), reshard_after_forward="yes"), "TypeError.*'yes'"),
        (lambda: fully_shard(net(), backend="nvshmem"), "ValueError.*'nvshmem'.*'cpu'"),
        (lambda: fully_shard(net(), timeout=0), "ValueError: timeout is 0; it must be a positive"),
    ]
    for action, words in cases:
        assert re.search(words, said := caught(action)), said
    fully_shard(net(), timeout=np.float32(60))


def test_options() -> None:
    ranks.run(_options, 1)


def _different(rank: int, world: int) -> None:
    other = rank == 1

    def frozen() -> nn.Module:
        model = net()
        if other:
            model[2].bias.requires_grad_(False)
        return model

    def renamed() -> nn.Module:
        layers = {"first": nn.Linear(4, 4), "last" if other else "second": nn.Linear(4, 4)}
        model = nn.Module()
        for name, layer in layers.items():
            model.add_module(name, layer)
        return model

    def quantised() -> nn.Module:
        model = net()
        if other:
            model[0].weight = nn.Parameter(torch.zeros(6, 4, dtype=torch.int8), requires_grad=False)
        return model

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if other else None)
    one = fully_shard(net())

    def give_tokens_on_one_rank() -> None:
        begin_minibatch(one, 7 if other else None)

    def bad_tokens(tokens: object) -> Callable[[], None]:
        return lambda: begin_minibatch(one, tokens if other else 1)

    def still_works() -> None:
        with minibatch(one, tokens=rank) as mb:
            raise ValueError(f"tokens {mb.tokens}")

    def different_order() -> None:
        model = fully_shard(net())
        begin_minibatch(model)
        if other:
            model._odc_engine.barrier.exchange("something else", {})
        end_minibatch(model)

    def with_optimizer(make: Callable[[nn.Module], torch.optim.Optimizer], steps: int = 1) -> None:
        model = fully_shard(net())
        optimizer = make(model)
        for _ in range(2):
            with minibatch(model):
                model(torch.ones(2, 4)).sum().backward()
            for _ in range(steps):
                optimizer.step()

    def in_groups(model: nn.Module) -> torch.optim.Optimizer:
        first, *rest = model.parameters()
        return torch.optim.SGD([{"params": [first, *rest * other]}, *[{"params": rest}] * (not other)], lr=0.1)

    def with_betas(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.1, betas=(0.8, 0.9 if other else 0.99))

    def different_factors() -> None:
        model = fully_shard(net())
        model.set_gradient_divide_factor(2.0 + rank)
        begin_minibatch(model)

    def frozen_on_one() -> None:
        model = fully_shard(net())
        model[2].bias.requires_grad_(not other)
        begin_minibatch(model)

    cases: list[tuple[Callable[[], object], str]] = [
        (
            lambda: with_optimizer(in_groups),
            r"RanksDiffer: the optimizer has 2 parameter groups on ranks \[0, 2\]; 1 parameter groups on",
        ),
        (different_factors, r"RanksDiffer: by rank, the gradient divide factors are \[2.0, 3.0, 4.0\]: set the same"),
        (
            lambda: with_optimizer(with_betas),
            r"RanksDiffer: .* betas .* 0.8, 0.99 on ranks \[0, 2\]; 0.8, 0.9 on ranks \[1\]",
        ),
        (
            lambda: with_optimizer(lambda model: torch.optim.AdamW(model.parameters()), steps=not other),
            r"RanksDiffer: .*step.* 1 times on ranks \[0, 2\]; 0 times on",
        ),
        (frozen_on_one, r"RanksDiffer: 2\.bias is frozen on ranks \[1\] only.*on all ranks"),
        (lambda: fully_shard(net(7 if other else 6)), r"RanksDiffer.*0\.weight.*\[[67], 4\].*against.*\[[67], 4\]"),
        (
            lambda: fully_shard(nn.Sequential(net(), nn.Linear(2, 2)) if other else nn.Sequential(net())),
            r"RanksDiffer.*1\.weight.*is only (here|there)",
        ),
        (lambda: fully_shard(renamed()), r"RanksDiffer.*(second|last)\.weight.*against.*(second|last)\.weight"),
        (
            lambda: fully_shard(frozen()),
            r"RanksDiffer.*differ: 2\.bias is frozen on the (first|second) only",
        ),
        (lambda: fully_shard(net(), mp_policy=policy), "RanksDiffer.*option policy.*bfloat16"),
        (lambda: fully_shard(net(), timeout=60 * (5 + rank)), "RanksDiffer.*timeout = 0:0[567]:00.*against"),
        (
            lambda: fully_shard(quantised()),
            r"^ValueError: 0\.weight is Parameter of torch\.int8"
            if other
            else r"RanksDiffer.*rank 1 could not shard its model: ValueError: 0\.weight.*int8",
        ),
        (give_tokens_on_one_rank, r"RanksDiffer: tokens was given on some ranks but not on ranks \[0, 2\]"),
        (bad_tokens(-1), "MinibatchFailed.*rank 1: ValueError: tokens is -1; give"),
        (still_works, "MinibatchFailed.*rank 0: ValueError: tokens 3.*rank 1: .*rank 2: "),
        (different_order, "RanksDiffer.*'(something else|leave minibatch 0)' while rank [01]"),
    ]
    for action, words in cases:
        assert re.search(words, said := caught(action)), said


def test_ranks_differ() -> None:
    ranks.run(_different, 3)


def _silent(rank: int, world: int) -> None:
    original = net()
    early = torch.optim.SGD(original.parameters(), lr=0.1)
    model = fully_shard(original, timeout=LONG_S)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def enter(tokens: object) -> int:
        with minibatch(model, tokens=tokens) as mb:
            return mb.tokens

    assert (enter(torch.tensor(3)), enter(np.int64(4))) == (6, 8)
    cases: list[tuple[Callable[[], object], str]] = [
        (early.step, "RuntimeError: .* as it was before fully_shard"),
        (lambda: fully_shard(net(), ignored_params=["0.weight"]), "TypeError: ignored_params holds '0.weight'"),
        (lambda: enter("five" if rank == 0 else 5), "MinibatchFailed: .*rank 0: ValueError: tokens is 'five'"),
    ]
    for action, words in cases:
        assert re.search(words, said := caught(action)), said
    assert enter(5) == 10
    said = caught(lambda: optimizer.step(lambda: enter(1)))
    assert re.search("MinibatchFailed: .*an optimizer step has begun and not ended", said), said


def test_silent_mistakes_are_refused() -> None:
    ranks.run(_silent, 2)
