"""Optimizer steps: groups as plain torch has them, the same on all ranks, and no gradient that is lost."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

from odc_triton import fully_shard, minibatch, use_odc
from tests.support import ranks
from tests.support.refusals import caught, net

X = torch.arange(12.0).view(3, 4) / 7


def bridged(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard as fsdp2

    fsdp2(model)
    return use_odc(model)


WAYS = {"fully_shard": fully_shard, "use_odc": bridged}

Groups = tuple[dict[str, Any], dict[str, Any]]  # of the first layer, of the second

# (class, arguments, groups)
SAME: list[tuple[type[optim.Optimizer], dict[str, Any], Groups]] = [
    (optim.SGD, {"lr": 0.1}, ({"maximize": True}, {"momentum": 0.9, "nesterov": True})),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9}, ({"dampening": 0.5}, {"weight_decay": 0.3})),
    (optim.AdamW, {"lr": torch.tensor(0.1)}, ({"amsgrad": True, "betas": (0.5, 0.6)}, {"lr": 0.3, "eps": 0.1})),
    (optim.Adam, {"lr": 0.1, "foreach": True}, ({"decoupled_weight_decay": True}, {"weight_decay": 0.3})),
    (optim.Adam, {"lr": 0.1}, ({"fused": True}, {"amsgrad": True, "maximize": True})),
    (optim.RMSprop, {"lr": 0.1}, ({"alpha": 0.5}, {"centered": True, "momentum": 0.5})),
    (optim.Adagrad, {"lr": 0.1}, ({"lr_decay": 0.5}, {"eps": 0.1})),
    (optim.Adamax, {"lr": 0.1}, ({"betas": (0.5, 0.6)}, {"maximize": True})),
    (optim.NAdam, {"lr": 0.1}, ({"momentum_decay": 0.5}, {"decoupled_weight_decay": True, "weight_decay": 0.3})),
    (optim.RAdam, {"lr": 0.1}, ({"betas": (0.5, 0.6)}, {"maximize": True})),
    (optim.Adadelta, {"lr": 0.1}, ({"rho": 0.5}, {"eps": 0.1})),
    (optim.ASGD, {"lr": 0.1}, ({"lambd": 0.5, "t0": 1}, {"alpha": 0.1})),
]


def _values(rank: int, world: int, number: int, sharded: bool) -> list[torch.Tensor]:
    """After five steps, of which the last three come after a change of all groups and with one that was added."""
    cls, arguments, (first, second) = SAME[number]
    model = net()
    if sharded:
        fully_shard(model)
    optimizer = cls([{"params": model[0].weight, **first}, {"params": model[2].parameters(), **second}], **arguments)
    for step in range(5):
        if step == 2:
            optimizer.add_param_group({"params": [model[0].bias], "weight_decay": 0.1})
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * 0.5
                if "betas" in group:
                    group["betas"] = (0.7, 0.8)
        with minibatch(model, tokens=1) if sharded else torch.enable_grad():
            for row in X[rank::world] if sharded else X:
                model(row[None]).square().sum().backward()
        optimizer.step()
        model.zero_grad()
    return [p.full_tensor().detach() if sharded else p.detach() for p in model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(SAME)), ids=lambda number: f"{SAME[number][0].__name__} {number}")
def test_groups_are_as_in_plain_torch(number: int) -> None:
    plain = _values(0, 1, number, False)
    for got in ranks.run(_values, 2, number, True):
        torch.testing.assert_close(got, plain, rtol=1e-4, atol=1e-5)  # sums in another order


def _other(rank: int, world: int, name: str) -> str:
    """What the minibatch after a step says, if the optimizer is made otherwise on rank 1."""
    module = fully_shard(net(1 if name == "no empty shards" else 6))  # rank 1 has no row of the first layer
    optimizer = OTHER[name][0](module, rank == 1)

    def steps() -> None:
        for _ in range(2):
            with minibatch(module, tokens=1):
                module(X).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    return caught(steps)


def _sgd(**other: Any) -> Callable[[nn.Module, bool], optim.Optimizer]:
    return lambda model, one: optim.SGD(model.parameters(), lr=0.1, **(other if one else {}))


def _members(model: nn.Module, one: bool) -> optim.Optimizer:
    groups = [[*model[0].parameters()], [*model[2].parameters()]]
    if one:
        groups = [[model[0].bias], [model[0].weight, *groups[1]]]
    return optim.SGD([{"params": groups[0]}, {"params": groups[1], "weight_decay": 0.1}], lr=0.1)


def _order(model: nn.Module, one: bool) -> optim.Optimizer:
    groups = [{"params": [*model[place].parameters()], "lr": 0.1} for place in ((2, 0) if one else (0, 2))]
    return optim.SGD(groups)


class _Own(optim.SGD):
    """A sum over the rank's own shard in a group, as some optimizers keep it: it differs, and is not compared."""

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["sum"] = float(self.param_groups[0]["params"][0].to_local().sum())
        return super().step(closure)


class _Table(optim.SGD):
    """A table of numbers as an argument, which would take long to send: it is not compared."""

    def __init__(self, params: Any, table: torch.Tensor) -> None:
        super().__init__(params, lr=0.1)
        self.param_groups[0]["table"] = table


OTHER = {
    "maximize": (_sgd(maximize=True), r"RanksDiffer.*maximize \(parameter group 0\) is False on ranks \[0\]; True on"),
    "nesterov": (_sgd(momentum=0.9, nesterov=True), r"RanksDiffer.*momentum \(.* group 0\) is 0.0 on ranks \[0\]"),
    "a tensor": (_sgd(weight_decay=torch.tensor(0.5)), r"RanksDiffer.*weight_decay .* is 0.0 on ranks \[0\]; 0.5 on"),
    "foreach": (_sgd(foreach=False), "nothing was raised"),
    "ints": (lambda model, one: optim.SGD(model.parameters(), lr=1 if one else 1.0), "nothing was raised"),
    "a long tensor": (
        lambda model, one: _Table(model.parameters(), torch.full((17,), float(one))),
        "nothing was raised",
    ),
    "no empty shards": (lambda model, _: optim.SGD(p for p in model.parameters() if p.to_local().numel()), "nothing"),
    "own sums": (lambda model, one: _Own(model.parameters(), lr=0.1), "nothing was raised"),
    "members": (_members, r"RanksDiffer.*group 0 also has 0.weight of the .* \[0\]; none of the .* \[1\]"),
    "order of groups": (_order, r"RanksDiffer.*group 0 also has 0.weight, 0.bias of the .*; 2.weight, 2.bias of"),
}


def test_steps_that_differ_between_ranks_are_refused_on_all() -> None:
    found = ranks.run_all(2, *((_other, name) for name in OTHER))
    for (name, (_, words)), said in zip(OTHER.items(), found, strict=True):
        assert all(re.search(words, text) for text in said), (name, said)


# What is done with the second of two optimizers after the first minibatch; what its step says after the second.
SLOW = {
    "nothing": (
        lambda b, inside: None,
        "RuntimeError: an optimizer steps 2.weight, whose gradient of an earlier .* lost",
    ),
    "step": (lambda b, inside: inside or b.step(), "nothing was raised"),
    "zero_grad": (lambda b, inside: inside or b.zero_grad(), "nothing was raised"),
    "zeroed": (lambda b, inside: inside or b.zero_grad(set_to_none=False), "nothing was raised"),
    "zero_grad inside": (lambda b, inside: inside and b.zero_grad(), "nothing was raised"),
    "zeroed inside": (lambda b, inside: inside and b.zero_grad(set_to_none=False), "nothing was raised"),
}


def _slow(rank: int, world: int, name: str, way: str) -> str:
    model, act = WAYS[way](net()), SLOW[name][0]
    a, b = (optim.SGD(model[place].parameters(), lr=0.1) for place in (0, 2))
    for step in range(2):
        with minibatch(model):
            if step == 1:
                act(b, True)
            model(X).sum().backward()
        a.step()
        a.zero_grad()
        if step == 0:
            act(b, False)
    return caught(b.step)


def test_an_optimizer_that_steps_every_second_minibatch() -> None:
    cases = [(name, way) for name in SLOW for way in WAYS]
    for case, said in zip(cases, ranks.run_all(2, *((_slow, *case) for case in cases)), strict=True):
        assert all(re.search(SLOW[case[0]][1], text) for text in said), (case, said)


def _compiled(rank: int, world: int, compiled: bool) -> list[torch.Tensor]:
    model = fully_shard(net())
    optimizer = optim.AdamW(model.parameters(), lr=0.1)
    step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
    for _ in range(2):
        with minibatch(model):
            model(X).sum().backward()
        step()
        optimizer.zero_grad()
    return [p.full_tensor().detach() for p in model.parameters()]


@pytest.mark.slow
def test_a_compiled_step() -> None:
    for got, want in zip(*ranks.run_all(2, (_compiled, True), (_compiled, False)), strict=True):
        torch.testing.assert_close(got, want)


ZEROING = {
    "none": lambda model, _: model.zero_grad(),
    "in place": lambda model, _: model.zero_grad(set_to_none=False),
    "foreach": lambda _, optimizer: optimizer.zero_grad(set_to_none=False),
    "one": lambda model, _: setattr(model[0].weight, "grad", None),
}


def _zeroed(rank: int, world: int, how: str, another: bool, way: str) -> str:
    model = WAYS[way](net())
    optimizer = optim.AdamW(model.parameters(), lr=0.1, foreach=True)

    def step() -> None:
        with minibatch(model):
            model(X).sum().backward()
            if rank == 1:
                ZEROING[how](model, optimizer)
            if another:
                model(X).sum().backward()

    return caught(step)


def test_zero_grad_after_a_backward_fails_the_minibatch_on_all_ranks() -> None:
    cases = [(how, another, way) for how in ZEROING for another in (False, True) for way in WAYS]
    for case, said in zip(cases, ranks.run_all(2, *((_zeroed, *case) for case in cases)), strict=True):
        for text in said:
            assert re.search(r"MinibatchFailed.*rank 1: .*was zeroed inside the minibatch.*zero_grad", text), (
                case,
                text,
            )
