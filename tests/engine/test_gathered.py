"""Whole parameters where shards lie apart: there when they are needed, fetched ahead, gone afterwards."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest
import torch
from torch import nn

from odc_triton import full_parameters, fully_shard, minibatch, publish
from odc_triton.engine.parameter import Slot
from odc_triton.engine.unit import Prefetch
from tests.support import ranks
from tests.support.blocks import Residual, filled
from tests.support.gradients import gradients_of
from tests.support.place import DEVICE, INTERPRETED

BACKEND = "cpu-sharded" if INTERPRETED else "cuda"
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]


class Stack(nn.Module):
    """Four blocks, of which `skip` are left out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.blocks = nn.Linear(3, 6), nn.ModuleList(Residual() for _ in range(4))
        self.leave = nn.Linear(6, 2)
        self.skip: set[int] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for index, block in enumerate(self.blocks):
            if index not in self.skip:
                x = block(x)
        return self.leave(x)


def _sharded(**options: object) -> nn.Module:
    return fully_shard(Stack(), backend=BACKEND, **options)


class _Watch:
    """Which units are filled as each block's forward and backward begins."""

    def __init__(self, model: nn.Module) -> None:
        self.seen: list[tuple[str, list[str]]] = []
        for index, block in enumerate(model.blocks):
            block.up.register_forward_pre_hook(lambda *_, i=index: self.seen.append((f"forward {i}", filled(model))))
            block.down.register_full_backward_pre_hook(
                lambda *_, i=index: self.seen.append((f"backward {i}", filled(model)))
            )


def _microbatch(model: nn.Module, rows: int = 5) -> None:
    model(torch.randn(rows, 3, device=DEVICE)).square().sum().backward()


def _b(*numbers: int) -> list[str]:
    return ["", *(f"blocks.{number}" for number in numbers)]


def test_one_unit_and_the_next_are_whole() -> None:
    model = _sharded()
    watch = _Watch(model)
    with minibatch(model):
        _microbatch(model)  # the order is not known yet: nothing is fetched ahead
        assert filled(model) == []
        first, watch.seen = watch.seen, []
        _microbatch(model)
        assert filled(model) == []
    assert first == [(f"forward {i}", _b(i)) for i in range(4)] + [(f"backward {i}", _b(i)) for i in (3, 2, 1, 0)]
    forward = [("forward 0", _b(0, 1)), ("forward 1", _b(1, 2)), ("forward 2", _b(2, 3)), ("forward 3", _b(3))]
    backward = [("backward 3", _b(2, 3)), ("backward 2", _b(1, 2)), ("backward 1", _b(0, 1)), ("backward 0", _b(0))]
    assert watch.seen == forward + backward


def test_what_is_whole_between_forward_and_backward() -> None:
    """By default the root alone stays whole. An evaluation and a forward that failed leave nothing whole."""
    model = _sharded()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.randn(5, 4, device=DEVICE))
    assert filled(model) == []
    for _ in range(2):
        with torch.no_grad():
            model(torch.randn(5, 3, device=DEVICE))
        assert filled(model) == []
    with minibatch(model):
        loss = model(torch.randn(5, 3, device=DEVICE)).sum()
        assert filled(model) == _b()
        loss.backward()
        assert filled(model) == []
        model.set_reshard_after_forward(False)
        loss = model(torch.randn(5, 3, device=DEVICE)).sum()
        assert filled(model) == _b(0, 1, 2, 3)
        loss.backward()
        assert filled(model) == []
        model.set_reshard_after_forward(True)
        loss = model(torch.randn(5, 3, device=DEVICE)).sum()
        assert filled(model) == []
        loss.backward()


def test_unshard_keeps_a_unit_whole() -> None:
    model = _sharded()
    block = model.blocks[1]
    block.unshard()
    assert torch.equal(block.up.weight.cpu(), Stack().blocks[1].up.weight)
    with torch.no_grad():
        model(torch.randn(5, 3, device=DEVICE))
    assert filled(model) == ["blocks.1"]
    block.reshard()
    assert filled(model) == []


def test_no_gathered_weight_is_saved() -> None:
    """What autograd keeps between forward and backward: activations, and weights whose storage is empty."""
    model = _sharded(reshard_after_forward=True)
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with minibatch(model), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(torch.randn(5, 3, device=DEVICE)).sum()
        weights = [t for t in saved if t.shape[-2:] in {(8, 6), (6, 8), (6, 3), (2, 6), (3, 6), (6, 2)}]
        assert len(weights) >= 9
        assert all(t.untyped_storage().nbytes() == 0 for t in weights)
        loss.backward()


def _other_orders(rank: int, world: int) -> dict:
    """Blocks left out, otherwise on each rank and in each microbatch: only the guess of what comes next is wrong."""
    model = _sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(3):
        with minibatch(model, tokens=10) as mb:
            for micro in range(2):
                model.skip = {(rank + step + micro) % 4}
                torch.manual_seed(7 * step + micro + 100 * rank)
                (model(torch.randn(5, 3, device=DEVICE)).square().sum() / mb.tokens).backward()
                assert filled(model) == []
        optimizer.step()
    return {name: value.cpu() for name, value in full_parameters(model)}


def test_another_order_is_still_right() -> None:
    model = Stack().to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(2):
            for micro in range(2):
                model.skip = {(rank + step + micro) % 4}
                torch.manual_seed(7 * step + micro + 100 * rank)
                (model(torch.randn(5, 3, device=DEVICE)).square().sum() / 20).backward()
        optimizer.step()
    want = {name: value.detach().cpu() for name, value in model.named_parameters()}
    for weights in ranks.run(_other_orders, 2):
        # fp32 sums in another order, three small steps.
        torch.testing.assert_close(weights, want, rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_threads_may_evaluate(monkeypatch: pytest.MonkeyPatch) -> None:
    put = Slot.put

    def slowly(self: Slot, value: nn.Parameter) -> None:
        time.sleep(1e-5)  # gives way, so that another thread finds a unit half whole if it can
        put(self, value)

    monkeypatch.setattr(Slot, "put", slowly)
    model, plain = _sharded(), Stack().to(DEVICE)
    inputs = [torch.randn(5, 3, device=DEVICE) for _ in range(4)]
    outputs: dict[tuple[int, int], torch.Tensor] = {}

    def evaluate(number: int) -> None:
        with torch.no_grad():
            for repeat in range(30):
                outputs[number, repeat] = model(inputs[number])

    threads = [threading.Thread(target=evaluate, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outputs) == 4 * 30
    for (number, _), output in outputs.items():
        torch.testing.assert_close(output, plain(inputs[number]))
    assert filled(model) == []


class Tied(nn.Module):
    """The weight of one block is another's too: two units need one storage."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Residual() for _ in range(2))
        self.blocks[1].up.weight = self.blocks[0].up.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_tied_over_units() -> None:
    plain, model = Tied().to(DEVICE), fully_shard(Tied(), backend=BACKEND)
    x = torch.randn(5, 6, device=DEVICE)
    for _ in range(2):
        plain.zero_grad()
        plain(x).square().sum().backward()
        with minibatch(model):
            model(x).square().sum().backward()
        # The same operations on the same numbers; a tied gradient is summed in another order.
        torch.testing.assert_close(gradients_of(model), gradients_of(plain), rtol=1e-5, atol=1e-6)
        model.zero_grad()


def _add_one(model: nn.Module) -> nn.Module:
    """Adds 1 to all masters, and returns what plain torch then has."""
    plain = Stack().to(DEVICE)
    with torch.no_grad():
        for parameter in [*plain.parameters(), *(each.shard.master for each in model._odc_engine.parameters)]:
            parameter.add_(1)
    return plain


def test_another_publication_is_read_anew() -> None:
    """Without a reshard, after which all is read anew in any case."""
    model, x = _sharded(), torch.randn(5, 3, device=DEVICE)
    model.unshard()
    plain = _add_one(model)
    publish(model)
    torch.testing.assert_close(model(x), plain(x))


def test_what_was_written_by_hand_is_read_in_the_next_minibatch() -> None:
    """Nobody publishes, and the root stays whole between minibatches."""
    model, x = _sharded(), torch.randn(5, 3, device=DEVICE)
    model(x)
    model.unshard()
    plain = _add_one(model)
    with minibatch(model):
        y = model(x)
    torch.testing.assert_close(y, plain(x))


def test_a_heap_lives_as_long_as_parameters_in_it() -> None:
    # Gradients go through kernels, as on CUDA: there tensors of peers' memory do not own it.
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    backend = "cpu-interpreter" if INTERPRETED else BACKEND
    fully_shard(model[0], backend=backend)
    heap = weakref.ref(model[0]._odc_engine.heap)
    fully_shard(model, backend=backend)
    gc.collect()
    assert heap() is not None


class _Fetched:
    """As a unit is to `Prefetch`."""

    is_fetched = False

    def fetch(self) -> None:
        self.is_fetched = True

    def wait(self) -> None:
        assert self.is_fetched

    def let_go(self) -> None:
        self.is_fetched = False


def test_what_was_fetched_ahead_in_vain_is_freed() -> None:
    prefetch, first, second = Prefetch(), _Fetched(), _Fetched()
    for unit in (first, second):
        prefetch.needs(unit, in_backward=False)
        unit.let_go()
    prefetch.microbatch_ends()
    prefetch.needs(first, in_backward=False)
    assert second.is_fetched
    prefetch.microbatch_ends()  # earlier than the last one
    assert not second.is_fetched


@pytest.mark.parametrize("backend", ["cuda", "gpu"])
def test_backends_are_refused(backend: str) -> None:
    if backend == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises((RuntimeError, ValueError), match=r"sees no GPU|must be 'auto' or one of"):
        fully_shard(Stack(), backend=backend)
