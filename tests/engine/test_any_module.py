"""Which modules fit: many of them, wrapped and called in many ways, against plain torch. Where whole parameters are
views, and where they are gathered and freed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from odc_triton import fully_shard, minibatch
from tests.support import ranks
from tests.support.blocks import batch
from tests.support.gradients import gradients_of


@dataclass
class Output:
    value: torch.Tensor
    nothing: None = None


class Block(nn.Module):
    """A unit with a checkpoint inside it, and outputs of several kinds."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.last(torch.tanh(self.first(x))))

    def forward(self, x: torch.Tensor) -> object:
        if self.kind.startswith("checkpoint"):
            return checkpoint(self._inner, x, use_reentrant=self.kind.endswith("reentrant"))
        y = self._inner(x)
        return {"tuple": (y, None, 3), "dataclass": Output(y), "dict": {"y": [y]}}[self.kind]


class Stack(nn.Module):
    def __init__(self, kind: str, count: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(kind) for _ in range(count)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            y = layer(x)
            if isinstance(y, tuple):
                y = y[0]
            elif isinstance(y, Output):
                y = y.value
            elif isinstance(y, dict):
                y = y["y"][0]
            x = y
        return x


class RootOnly(nn.Module):
    """No units below: its own dataclass is all there is to see its backward by, and that recomputes."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block("checkpoint")

    def forward(self, x: torch.Tensor) -> Output:
        return Output(self.block(x))


class Tied(nn.Module):
    """One weight in two units and in the root."""

    def __init__(self, use_reentrant: bool | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.out = nn.Linear(4, 4)
        self.layers[1].weight = self.out.weight = self.layers[0].weight
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            again = self.use_reentrant
            x = torch.tanh(layer(x) if again is None else checkpoint(layer, x, use_reentrant=again))
        return self.out(x)


class Twice(nn.Module):
    """The same unit called twice, registered twice, and calling itself once more."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(4, 4)
        self.layers = nn.ModuleList([shared, nn.Linear(4, 4), shared])
        self.again = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        if not self.again:
            self.again = True
            x = self(x)
            self.again = False
        return x


class Handover(nn.Module):
    """A unit that returns a parameter and its own input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.layers[0].forward = lambda x: (x, self.layers[0].weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, weight = self.layers[0](x)
        return self.layers[1](x @ weight)


class ListOfLists(nn.Module):
    """Blocks that are lists of their parts: nothing calls such a block."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for first, second in self.layers:
            x = second(torch.relu(first(x)))
        return x


def _sum(model: nn.Module, x: torch.Tensor) -> None:
    output = model(x)
    (output.value if isinstance(output, Output) else output).square().sum().backward()


def _lstm(model: nn.Module, x: torch.Tensor) -> None:
    model(x)[0].square().sum().backward()


def _reentrant_input(model: nn.Module, x: torch.Tensor) -> None:
    _sum(model, x.requires_grad_())


def _two_backwards(model: nn.Module, x: torch.Tensor) -> None:
    output = model(x)
    output.sum().backward(retain_graph=True)
    output.square().sum().backward()


def _gradient_penalty(model: nn.Module, x: torch.Tensor) -> None:
    x.requires_grad_()
    output = model(x)
    (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    (output.sum() + slope.square().sum()).backward()


def _no_grad_first(model: nn.Module, x: torch.Tensor) -> None:
    with torch.no_grad():
        target = model(x + 1)
    (model(x) - target).square().sum().backward()


def _tokens(model: nn.Module, x: torch.Tensor) -> None:
    model((x * 3).long().abs() % 7).square().sum().backward()


def _autocast(model: nn.Module, x: torch.Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        output = model(x)
    output.float().square().sum().backward()


def _reused_leaf(model: nn.Module, x: torch.Tensor) -> None:
    leaf = nn.Parameter(x)
    for _ in range(2):
        _sum(model, leaf)


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, torch.Tensor], None]]] = {
    "lstm": (lambda: nn.LSTM(4, 5, num_layers=2, bidirectional=True), _lstm),
    "transformer layer": (lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), _sum),
    "twice": (Twice, _sum),
    "tied": (lambda: Tied(None), _sum),
    "tied, checkpoint": (lambda: Tied(False), _sum),
    "tied, reentrant checkpoint": (lambda: Tied(True), _reentrant_input),
    "inner checkpoint": (lambda: Stack("checkpoint"), _sum),
    "inner reentrant checkpoint": (lambda: Stack("checkpoint, reentrant"), _reentrant_input),
    "checkpoint behind a dataclass": (RootOnly, _sum),
    "tuple": (lambda: Stack("tuple"), _sum),
    "dataclass": (lambda: Stack("dataclass"), _sum),
    "dict": (lambda: Stack("dict"), _sum),
    "two backwards": (lambda: Stack("tuple"), _two_backwards),
    "gradient penalty": (lambda: Stack("tuple"), _gradient_penalty),
    "no_grad first": (lambda: Stack("tuple"), _no_grad_first),
    "sparse embedding": (lambda: nn.Sequential(nn.Embedding(7, 3, sparse=True), nn.Linear(3, 2)), _tokens),
    "autocast": (lambda: Stack("tuple"), _autocast),
    "handover": (Handover, _reused_leaf),
    "blocks are lists": (ListOfLists, _sum),
}


def _module(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODULES[name][0]()


def _gradients_of_modules(rank: int, world: int, backend: str, names: list[str]) -> dict[str, dict[str, torch.Tensor]]:
    result = {}
    for name in names:
        _, run = MODULES[name]
        model = fully_shard(_module(name), backend=backend)
        for _ in range(2):  # the second shows what the first left behind
            with minibatch(model, tokens=1):
                for seed in range(2 - rank):
                    run(model, batch(seed))
        assert all(isinstance(p, dist.tensor.DTensor) for p in model.parameters()), name
        assert not any(p.leaf._backward_hooks for p in model._odc_engine.parameters), name
        assert not any(each.is_filled for unit in model._odc_engine.units for each in unit.gathered), name
        assert model.state_dict().keys() == _module(name).state_dict().keys()
        result[name] = gradients_of(model)
    return result


def test_modules() -> None:
    calls = [("cpu", [*MODULES][::2]), ("cpu-sharded", [*MODULES])]
    by_backend = ranks.run_all(2, *((_gradients_of_modules, *call) for call in calls))
    results = [found for of_ranks in by_backend for found in of_ranks]
    for name, (_, run) in MODULES.items():
        model = _module(name)
        for seed in (0, 1, 0):
            run(model, batch(seed))
        want = {key: grad.to_dense() if grad.is_sparse else grad for key, grad in gradients_of(model).items()}
        for got in (found[name] for found in results if name in found):
            # bf16 products under autocast: the sums over microbatches are fp32, the products are the same bits
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
