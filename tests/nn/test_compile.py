"""torch.compile around our operators: blocks compiled alone, against plain transformers; what reaches the owners."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from odc_triton import fully_shard, minibatch, replace_layers
from odc_triton.engine.parameter import ShardedParameter
from tests.support import ranks
from tests.support.deadlines import LONG_S
from tests.support.families import WIDE, causal_lm
from tests.support.gradients import assert_same_gradients
from tests.support.parity import TRANSFORMS

# What Dynamo and inductor do themselves: look at the gradients of a graph's inputs, and two old uses.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.autograd.function.Function.* should not be instantiated"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]


# Of a gradient's norm. fp32 sums in another order, inductor's and the kernels' too. The floor is for what is zero but
# for rounding.
TOLERANCE, FLOOR = 1e-5, 1e-6


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What is compiled, by what, and how it is sharded. `order`: of compiling and fully_shard."""

    family: str = "Qwen3"
    layers: int = 2
    choice: str = "auto"
    attention: str | None = "sdpa"
    engine: str = "cpu"
    compiler: str = "aot_eager"
    order: str = "before"
    change: str = "none"
    roles: tuple[str, ...] = ("attention", "embedding", "linear")
    lengths: tuple[int, ...] = (7, 12)  # a microbatch each; a second length makes the graph of any length


class Twice(nn.Module):
    """A block that calls one Linear twice, has two of one weight, and may recompute a part of itself."""

    def __init__(self, recomputes: bool) -> None:
        super().__init__()
        self.recomputes = recomputes
        self.again, self.one, self.other = nn.Linear(16, 16), nn.Linear(16, 24), nn.Linear(16, 24, bias=False)
        self.other.weight = self.one.weight
        self.down = nn.Linear(24, 16)

    def _part(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.one(x)) * self.other(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.again(torch.tanh(self.again(x)))
        return x + (checkpoint(self._part, x, use_reentrant=False) if self.recomputes else self._part(x))


class Blocks(nn.Module):
    """Two of them, at the places of a causal LM's."""

    def __init__(self, recomputes: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(97, 16)
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(Twice(recomputes) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.model.layers:
            x = layer(x)
        return x.square().mean()


def build(setup: Setup) -> nn.Module:
    torch.manual_seed(0)
    if setup.family.startswith("blocks"):
        model = Blocks("recompute" in setup.family)
    else:
        sizes = WIDE | {"num_hidden_layers": setup.layers}
        model = causal_lm(setup.family, attention=setup.attention or "eager", **sizes)
    TRANSFORMS[setup.change](model)
    return model


def loss_of(model: nn.Module, number: int, length: int) -> torch.Tensor:
    ids = torch.randint(3, 97, (1, length), generator=torch.Generator().manual_seed(number))
    if isinstance(model, Blocks):
        return model(ids)
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def compile_parts(model: nn.Module, setup: Setup) -> None:
    for layer in model.model.layers:
        layer.compile(backend=setup.compiler, fullgraph=True)


def replaced(setup: Setup) -> nn.Module:
    """The model on shards, compiled as `setup` says; each test begins with no graph."""
    torch._dynamo.reset()
    counters.clear()
    model = build(setup)
    replace_layers(model, roles=setup.roles, choice=setup.choice, verbose=False)
    if setup.order == "before":
        compile_parts(model, setup)
    fully_shard(model, backend=setup.engine)
    if setup.order == "after":
        compile_parts(model, setup)
    return model


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    named = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: getattr(grad, "full_tensor", lambda grad=grad: grad)().clone() for name, grad in named.items()}


def run(rank: int, world: int, setup: Setup) -> tuple[dict[int, float], dict[str, torch.Tensor], dict, int]:
    """Losses of this rank's microbatches by number, the gradients, graph breaks, graphs."""
    model, losses = replaced(setup), {}
    with minibatch(model, tokens=1):
        for number, length in enumerate(setup.lengths):
            if number % world == rank:
                loss = loss_of(model, number, length)
                loss.backward()
                losses[number] = loss.item()
    return losses, gradients_of(model), dict(counters["graph_break"]), counters["stats"]["unique_graphs"]


@functools.cache
def plain(family: str, layers: int, attention: str | None, change: str, lengths: tuple[int, ...]) -> tuple[list, dict]:
    """Losses and gradients of the same microbatches by plain torch on an unsharded model."""
    model = build(Setup(family=family, layers=layers, attention=attention, change=change))
    losses = []
    for number, length in enumerate(lengths):
        loss = loss_of(model, number, length)
        loss.backward()
        losses.append(loss.item())
    return losses, gradients_of(model)


def same(setup: Setup, losses: dict[int, float], gradients: dict[str, torch.Tensor]) -> None:
    want_losses, want = plain(setup.family, setup.layers, setup.attention, setup.change, setup.lengths)
    for number, loss in losses.items():
        assert loss == pytest.approx(want_losses[number], rel=TOLERANCE)
    assert_same_gradients(gradients, want, TOLERANCE, FLOOR)


def check(setup: Setup, world: int = 1) -> int:
    """Runs it on so many ranks, in this process if it is one, and compares; returns the number of graphs."""
    outcomes = [run(0, 1, setup)] if world == 1 else ranks.run(run, world, setup)
    for losses, gradients, breaks, graphs in outcomes:
        same(setup, losses, gradients)
        assert graphs > 0, "nothing was compiled"
        assert breaks == {}
    return outcomes[0][3]


@pytest.mark.slow
def test_by_kernels() -> None:
    """On shards apart kernels may read them, and add to them, and the weights have no memory of their own."""
    check(Setup(choice="triton/direct/fused", engine="cpu-interpreter", attention=None, layers=1, lengths=(5,)))


def test_blocks_on_two_ranks() -> None:
    check(Setup(family="Llama", order="after", engine="cpu-sharded", lengths=(7, 12, 7)), world=2)


def test_checkpointing() -> None:
    check(Setup(change="checkpointing", choice="eager/direct/fused", lengths=(7,)))


def test_the_fused_head_and_its_loss_around_compiled_blocks() -> None:
    check(Setup(roles=("attention", "embedding", "linear", "head"), engine="cpu-sharded", lengths=(7,)))


@pytest.mark.parametrize(
    ("family", "choice"), [("blocks", "eager/gathered/whole"), ("blocks that recompute", "eager/direct/fused")]
)
def test_tied_and_repeated(family: str, choice: str) -> None:
    check(Setup(family=family, choice=choice, engine="cpu-sharded", lengths=(7,)))


@pytest.mark.slow
def test_inductor() -> None:
    check(Setup(compiler="inductor", layers=1, engine="cpu-sharded", choice="eager/direct/fused", lengths=(7,)))


@pytest.mark.slow
def test_graphs_do_not_grow_with_the_layers() -> None:
    """One for the first length, one for any; one more, as what enters the first block is no view."""
    setup = Setup(choice="eager/direct/fused", engine="cpu-sharded", lengths=(7,))
    few = check(setup)
    assert few == check(replace(setup, layers=5)) <= 2
    assert check(replace(setup, lengths=(7, 12, 31, 5))) <= 3


def _wait_for(file: Path) -> None:
    deadline_s = time.monotonic() + LONG_S
    while not file.exists():
        assert time.monotonic() < deadline_s, f"{file.name} did not come"
        time.sleep(0.005)


def _at_once(rank: int, world: int, setup: Setup, folder: str) -> tuple[dict, dict, bool]:
    """Rank 0 stands still inside its backward's first operator until rank 1 has added all of its gradients."""
    inside, added = Path(folder, "inside"), Path(folder, "added")
    model, held = replaced(setup), []

    def waits(method: Callable) -> Callable:
        def held_once(self: ShardedParameter, *args: object) -> object:
            if not held and self.name.startswith("model.layers"):
                held.append(float(self.shard.gradient_shard.norm()))
                inside.touch()
                _wait_for(added)
                held.append(float(self.shard.gradient_shard.norm()))
            return method(self, *args)

        return held_once

    with minibatch(model, tokens=1):
        loss = loss_of(model, rank, setup.lengths[rank])
        if rank == 0:
            with mock.patch.object(ShardedParameter, "add_gradient", waits(ShardedParameter.add_gradient)):
                with mock.patch.object(ShardedParameter, "open_sink", waits(ShardedParameter.open_sink)):
                    loss.backward()
        else:
            _wait_for(inside)
            loss.backward()
            added.touch()
    return {rank: loss.item()}, gradients_of(model), held


def test_what_another_rank_adds_during_a_backward_stays(tmp_path: Path) -> None:
    setup = Setup(family="blocks", engine="cpu-sharded", choice="eager/direct/fused")
    outcomes = ranks.run(_at_once, 2, setup, str(tmp_path))
    for losses, gradients, _ in outcomes:
        same(setup, losses, gradients)
    before, after = outcomes[0][2]
    assert before == 0 < after, "rank 1 added nothing while rank 0 was inside its backward"
