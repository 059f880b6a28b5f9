"""What users do around replaced layers: norms of weights, hooks, weights read elsewhere, graphs that bypass outputs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from odc_triton import MinibatchFailed, fully_shard, minibatch, replace_layers

PLACES = pytest.mark.parametrize(("choice", "backend"), [("auto", "cpu"), ("eager/direct/fused", "cpu-sharded")])


@dataclass
class Inner:
    """An output in which nobody looks for tensors."""

    value: list[Callable[[], torch.Tensor]]


class Block(nn.Module):
    """Hides its output; the loss also takes an inner tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.inner: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> Inner:
        h = torch.tanh(self.a(x))
        self.inner = h.square().mean()
        y = self.b(h)
        return Inner([lambda: y])


class Model(nn.Module):
    """`use`: what its forward does with a table and a layer besides calling them."""

    def __init__(self, use: Callable[[Model, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(11, 8), nn.Linear(8, 8)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8)), nn.Sequential(nn.Linear(8, 8))])
        self.use = use

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.layer(self.table(ids))
        for block in self.blocks:
            h = h + block(h)
        return self.use(self, h)


USES: dict[str, Callable[[Model, torch.Tensor], torch.Tensor]] = {
    "transposed": lambda model, h: h @ model.table.weight.T,
    "linear": lambda model, h: F.linear(h, model.table.weight) + model.layer.bias.sum(),
    "penalty": lambda model, h: h.sum() + model.layer.weight.square().sum() + model.table.weight.norm(),
    "shape": lambda model, h: h.to(model.table.weight.dtype) * model.layer.weight.shape[0] / len(model.table.weight),
}


def _gradients(model: nn.Module, sharded: bool, loss: Callable[[], torch.Tensor]) -> dict[str, torch.Tensor | None]:
    if not sharded:
        loss().backward()
        return {name: p.grad for name, p in model.named_parameters()}
    with minibatch(model, tokens=1):
        loss().backward()
    return {name: None if p.grad is None else p.grad.to_local() for name, p in model.named_parameters()}


def _same(got: dict[str, torch.Tensor | None], want: dict[str, torch.Tensor | None]) -> None:
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        assert (got[name] is None) == (gradient is None), name
        if gradient is not None:  # fp32 sums in another order
            torch.testing.assert_close(got[name], gradient, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@PLACES
@pytest.mark.parametrize("use", USES)
def test_weights_that_are_read_elsewhere_too(use: str, choice: str, backend: str) -> None:
    torch.manual_seed(0)
    ids, plain = torch.tensor([[1, 4, 4, 9]]), Model(USES[use])
    ours = copy.deepcopy(plain)
    replace_layers(ours, choice=choice, verbose=False)
    fully_shard(ours, backend=backend)
    want = _gradients(plain, False, lambda: plain(ids).square().mean())
    _same(_gradients(ours, True, lambda: ours(ids).square().mean()), want)


def test_what_is_known_without_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models ask for a weight's dtype in every layer: no reason to read it from its owners."""
    from odc_triton.engine.shard import HeapShard

    read, reads = HeapShard.read, []
    monkeypatch.setattr(HeapShard, "read", lambda self: reads.append(self.spec.name) or read(self))
    for use, expected in (("shape", []), ("linear", ["table.weight", "layer.bias"])):
        model = Model(USES[use])
        replace_layers(model, choice="eager/direct/fused", verbose=False)
        fully_shard(model, backend="cpu-sharded")
        reads.clear()
        model(torch.tensor([1, 2]))
        assert reads == expected
        model.unshard()
        reads.clear()  # what has memory is not read again
        model(torch.tensor([1, 2]))
        model.reshard()
        assert reads == []


def test_edits_that_would_be_lost_are_refused() -> None:
    model = Model(USES["shape"])
    replace_layers(model, choice="eager/direct/fused", verbose=False)
    fully_shard(model, backend="cpu-sharded")
    edits = [
        lambda weight: weight.clamp_(-1, 1),
        lambda weight: weight.requires_grad_(False),
        lambda weight: weight.__setitem__(0, 1.0),
        lambda weight: setattr(weight, "data", torch.zeros(1)),
    ]
    seen = []

    def edit(module: nn.Module, given: tuple) -> None:
        for each in edits:
            with pytest.raises(RuntimeError, match="on a parameter that is never whole would edit a copy"):
                each(module.weight)
            seen.append(each)

    model.table.register_forward_pre_hook(edit)
    with torch.no_grad():
        model(torch.tensor([1, 2]))
    assert len(seen) == len(edits)


@PLACES
def test_unshard_gives_them_memory(choice: str, backend: str) -> None:
    model = Model(USES["shape"])
    want = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    replace_layers(model, choice=choice, verbose=False)
    fully_shard(model, backend=backend)
    model.unshard()
    got = {name: value.detach().clone() for name, value in model.named_parameters() if "blocks" not in name}
    model.reshard()
    assert set(got) == {"table.weight", "layer.weight", "layer.bias"}
    assert all(torch.equal(value, want[name]) for name, value in got.items())


@PLACES
@pytest.mark.parametrize("wrap", [parametrizations.weight_norm, parametrizations.spectral_norm, nn.utils.weight_norm])
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
def test_weights_that_are_computed(wrap: Callable, choice: str, backend: str) -> None:
    models = []
    for replaced in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
        if replaced:
            replace_layers(model, choice=choice, verbose=False)
        torch.manual_seed(1)
        wrap(model[0])
        models.append(model.eval())  # spectral_norm would go on with its iteration
    plain, ours = models
    x = torch.randn(5, 8)
    torch.testing.assert_close(ours(x), plain(x))
    fully_shard(ours, backend=backend)
    want = _gradients(plain, False, lambda: plain(x).square().sum())
    _same(_gradients(ours, True, lambda: ours(x).square().sum()), want)


class Hiding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        first = self.blocks[0](x).value[0]()
        second = self.blocks[1](first).value[0]()
        return [second.sum() + self.blocks[0].inner + self.blocks[1].inner]


@PLACES
def test_a_backward_that_the_unit_does_not_hear_of(choice: str, backend: str) -> None:
    """Blocks whose outputs nobody can watch: their weights may have been let go of when their backward comes."""
    torch.manual_seed(0)
    plain = Hiding()
    ours = copy.deepcopy(plain)
    replace_layers(ours, choice=choice, verbose=False)
    fully_shard(ours, backend=backend)
    x = torch.randn(3, 8)
    _same(_gradients(ours, True, lambda: ours(x)[0]), _gradients(plain, False, lambda: plain(x)[0]))


def test_hooks_that_would_never_fire_are_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    replace_layers(model, verbose=False)
    fully_shard(model)
    model[0].register_forward_pre_hook(lambda layer, _: layer.weight.register_hook(lambda g: 10 * g) and None)
    with pytest.raises(MinibatchFailed, match=r"0.weight has a gradient hook"), minibatch(model):
        model(torch.randn(2, 3)).sum().backward()
