"""Modules, graphs and loops as users write them, where whole parameters are gathered and freed, against plain torch."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from odc_triton import fully_shard, minibatch, register_fsdp_forward_method
from odc_triton.nn.operand import is_sharded
from tests.support import ranks
from tests.support.blocks import Residual, filled
from tests.support.gradients import gradients_of
from tests.support.place import DEVICE, INTERPRETED

BACKEND = "cpu-sharded" if INTERPRETED else "cuda"
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
STEPS, MICROBATCHES = 2, 3


class Net(nn.Module):
    """Three blocks. Before them two layers of the root's own: their backward needs a weight after all blocks' did."""

    def __init__(self, block: Callable[[], nn.Module] = Residual) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6))
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.head = nn.Linear(6, 4)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.stem(x)))


def _data(number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(5, 6, generator=generator).to(DEVICE)


def _loss(y: torch.Tensor) -> torch.Tensor:
    return y.square().sum() / 10


def _simple(model: nn.Module, number: int) -> torch.Tensor:
    _loss(y := model(_data(number))).backward()
    return y


@dataclass(frozen=True, kw_only=True)
class Case:
    """`microbatch(model, number)` runs forward and backward; `inner(model)` are units sharded before the root."""

    build: Callable[[], nn.Module] = Net
    microbatch: Callable[[nn.Module, int], torch.Tensor] = _simple
    inner: Callable[[nn.Module], list[nn.Module]] = lambda model: []
    prepare: Callable[[nn.Module], None] = lambda model: None


def _shard(case: Case) -> nn.Module:
    model = case.build()
    for module in case.inner(model):
        fully_shard(module, backend=BACKEND)
    fully_shard(model, backend=BACKEND)
    case.prepare(model)
    return model


def _train(model: nn.Module, case: Case) -> tuple[list, list[dict], list[list[str]]]:
    """Outputs, gradients per step, and what was left filled after a microbatch."""
    sharded = is_sharded(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    outputs, gradients, left = [], [], []
    for step in range(STEPS):
        with minibatch(model, tokens=1) if sharded else contextlib.nullcontext():
            for micro in range(MICROBATCHES):
                outputs.append(case.microbatch(model, MICROBATCHES * step + micro).detach().clone())
                left.append(filled(model) if sharded else [])
        gradients.append({name: grad.cpu() for name, grad in gradients_of(model).items()})
        optimizer.step()
        optimizer.zero_grad()
    return outputs, gradients, left


def _compare(case: Case, outputs: list, gradients: list[dict], left: list[list[str]]) -> None:
    want_outputs, want_gradients, _ = _train(case.build().to(DEVICE), case)
    assert not any(left), f"whole parameters were left behind: {left}"
    # The same operations in fp32; gradients of several microbatches are summed in another order.
    torch.testing.assert_close((outputs, gradients), (want_outputs, want_gradients), rtol=1e-4, atol=1e-5)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.inner, self.leave, self.skip = nn.Linear(6, 6), Residual(), nn.Linear(6, 6), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.enter(x)) * x
        x = torch.tanh(self.enter(x)) * x
        return self.leave(x if self.skip else self.inner(x))


def _outer_and_inner(model: nn.Module) -> list[nn.Module]:
    return [unit for block in model.blocks for unit in (block.inner, block)]


def _later_inner(model: nn.Module, number: int) -> torch.Tensor:
    model.blocks[0].skip = number == 0
    return _simple(model, number)


class Low(nn.Module):
    """LoRA's pattern: a frozen weight, which the backward needs for dx, beside two small ones that train."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x))


def _lora() -> nn.Module:
    model = Net().requires_grad_(False)
    for block in model.blocks:
        block.up, block.down = Low(block.up), Low(block.down)
    return model


def _checkpointed(model: nn.Module, number: int, *, how: str, **kind: bool) -> torch.Tensor:
    if how == "model":
        _loss(y := checkpoint(model, _data(number).requires_grad_(), **kind)).backward()
        return y

    def part(start: int, stop: int, x: torch.Tensor) -> torch.Tensor:
        return part(start + 1, stop, model.blocks[start](x)) if start < stop else x

    model.body = lambda x: checkpoint(partial(part, 2, 3), checkpoint(partial(part, 0, 2), x, **kind), **kind)
    return _simple(model, number)


def _compile(model: nn.Module) -> None:
    for block in model.blocks:
        block.compile(backend="aot_eager")


_KINDS = {
    "reentrant": {"use_reentrant": True},
    "saved": {"use_reentrant": False},
    "late": {"use_reentrant": False, "early_stop": False},
}

CASES = {
    "nested": Case(build=partial(Net, Outer), inner=_outer_and_inner),
    "lora": Case(build=_lora),
    "compiled": Case(prepare=_compile),
    **{
        f"checkpoint {how} {kind}": Case(microbatch=partial(_checkpointed, how=how, **_KINDS[kind]))
        for how, kind in (("segment", "reentrant"), ("segment", "late"), ("model", "saved"))
    },
}


def _two_forwards(model: nn.Module, number: int) -> torch.Tensor:
    chosen, rejected = model(_data(number)), model(_data(number + 50))
    _loss(chosen * rejected).backward()
    return chosen


class Method(Net):
    def loss(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = torch.tanh(self.stem[0](x))[:, :6]
        return _loss(self(x))


def _method(model: nn.Module, number: int) -> torch.Tensor:
    (loss := model.loss(_data(number))).backward()
    return loss


class Listing(Residual):
    def forward(self, x: torch.Tensor, losses: list) -> torch.Tensor:
        losses.append(self.up(x).square().mean())
        return super().forward(x)


class ListingNet(Net):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        for block in self.blocks:
            x = block(x, losses)
        return x + sum(losses)


class Ignoring(Residual):
    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class IgnoringNet(Net):
    def __init__(self) -> None:
        super().__init__(Ignoring)
        self.memory = nn.Linear(6, 6)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        memory = self.memory(x.detach())
        for block in self.blocks:
            x = block(x, memory)
        return x


CASES |= {
    "two forwards, one backward": Case(microbatch=_two_forwards),
    "nested from the second on": Case(build=partial(Net, Outer), inner=_outer_and_inner, microbatch=_later_inner),
    "a method calls the forward": Case(
        build=Method, microbatch=_method, prepare=lambda model: register_fsdp_forward_method(model, "loss")
    ),
    "a list is written to": Case(build=partial(ListingNet, Listing)),
    "an input is ignored": Case(build=IgnoringNet),
}


# Tracing reads the .grad of a tensor that is no leaf, which torch warns about.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("name", CASES)
def test_as_plain_torch(name: str) -> None:
    _compare(CASES[name], *_train(_shard(CASES[name]), CASES[name]))


@pytest.mark.parametrize("how", ["forward", "backward", "caught"])
def test_an_exception_leaves_nothing_whole(how: str) -> None:
    case = Case()
    model = _shard(case)

    def fail(*_: object) -> None:
        raise ArithmeticError("overflow")

    up = model.blocks[1].up
    hook = up.register_forward_hook(fail) if how == "forward" else up.register_full_backward_hook(fail)

    def failing() -> None:
        with minibatch(model, tokens=1):
            with contextlib.suppress(ArithmeticError) if how == "caught" else contextlib.nullcontext():
                _simple(model, 0)
            hook.remove()
            _simple(model, 0)

    with pytest.raises(RuntimeError, match="minibatch 0 failed"):
        failing()
    hook.remove()
    assert filled(model) == []
    _compare(case, *_train(model, case))


@dataclasses.dataclass
class State:
    x: torch.Tensor


class Stateful(Residual):
    def forward(self, state: State) -> State:
        return State(super().forward(state.x))


class StatefulNet(Net):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        return super().body(State(x)).x


def test_one_unit_and_the_next_are_whole_in_a_backward() -> None:
    """Also where a unit's input is no tensor."""
    model = _shard(Case(build=partial(StatefulNet, Stateful)))
    seen: list[list[str]] = []
    for block in model.blocks:
        block.up.register_full_backward_pre_hook(lambda *_: seen.append(filled(model)))
    with minibatch(model):
        for number in range(2):
            _simple(model, number)
    assert max(map(len, seen)) == 3, seen


def test_a_frozen_model_in_a_checkpoint_is_freed() -> None:
    model, teacher = _shard(Case()), _shard(Case(build=lambda: Net().requires_grad_(False)))
    with minibatch(model):
        x = _data(0)
        checkpoint(lambda x: _loss(model(x) - teacher(x)), x, use_reentrant=False).backward()
    assert filled(teacher) == []


class Prompt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(1, 6))

    def forward(self, count: int) -> torch.Tensor:
        return self.rows.expand(count, -1)


class Prompted(Net):
    def __init__(self) -> None:
        super().__init__()
        self.prompt = Prompt()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.prompt(len(x)))


def _prompted(rank: int, world: int) -> tuple:
    case = Case(build=Prompted, inner=lambda model: [model.prompt, *model.blocks])
    return _train(_shard(case), case)


def test_a_view_of_a_parameter_as_output() -> None:
    _compare(Case(build=Prompted), *ranks.run(_prompted, 1)[0])  # in a process of its own: it may die
