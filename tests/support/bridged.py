"""Models of torch's own `fully_shard` under `use_odc`: how they are sharded, and what plain torch makes of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Shard

from bench.whole import whole
from odc_triton import full_parameters, minibatch, replace_layers, use_odc
from tests.support import parity
from tests.support.families import with_lora
from tests.support.models import CASES, Case

SIZES = [5, 17, 4, 9, 11, 2]  # of one minibatch's microbatches, all ranks together
DEALS = {1: [[0, 1, 2, 3]], 2: [[0, 1, 2], [3]], 3: [[0, 1, 2], [3], []], 4: [[0, 1, 2], [3], [], [4, 5]]}


class Branches(nn.Module):
    """One branch for each parity of the batch's size, so a microbatch leaves the other without a gradient; or both."""

    def __init__(self, both: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Branch(both) for _ in range(2))
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class _Branch(nn.Module):
    def __init__(self, both: bool) -> None:
        super().__init__()
        self.both = both
        self.ways = nn.ModuleDict({"odd": nn.Linear(6, 6), "even": nn.Linear(6, 6)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ways = ("odd", "even") if self.both else ("odd",) if len(x) % 2 else ("even",)
        return torch.relu(sum(self.ways[way](x) for way in ways)) + x


BRIDGED = CASES | {
    name: Case(
        build=functools.partial(Branches, both),
        batch=lambda generator, size: (torch.randn(size, 6, generator=generator),),
        loss=lambda model, batch: model(batch[0]).square().sum(),
        count=lambda batch: len(batch[0]),
    )
    for name, both in (("branches", False), ("both branches", True))
}


def _blocks(model: nn.Module, **options: Any) -> None:
    whole = model.get_base_model() if hasattr(model, "get_base_model") else model
    for block in model.blocks if isinstance(model, Branches) else whole.model.layers:
        fully_shard(block, **options)
    fully_shard(model, **options)


def _titan(model: nn.Module, **options: Any) -> None:
    """torchtitan's and accelerate's units: the embedding apart, the last norm together with the head."""
    fully_shard(model.model.embed_tokens, **options)
    for block in model.model.layers:
        fully_shard(block, **options)
    fully_shard([model.model.norm, model.lm_head], **options)
    fully_shard(model, **options)


def _columns(model: nn.Module, **options: Any) -> None:
    """Matrices whose columns can be split evenly are split so."""

    def place(parameter: nn.Parameter) -> Shard | None:
        return Shard(1) if parameter.ndim == 2 and parameter.shape[1] % 4 == 0 else None

    _blocks(model, shard_placement_fn=place, **options)


LAYOUTS: dict[str, Callable[..., None]] = {"blocks": _blocks, "titan": _titan, "root": fully_shard, "columns": _columns}


TRANSFORMS: dict[str, Callable[[nn.Module], nn.Module]] = {
    **{name: parity.TRANSFORMS[name] for name in ("checkpointing", "frozen", "lora")},
    "": parity.TRANSFORMS["none"],
    "experts": lambda model: replace_layers(model, roles=["experts"], verbose=False) and model,
    "lora, bf16 base": lambda model: with_lora(model.to(torch.bfloat16)),
}


def made(name: str, transform: str) -> nn.Module:
    torch.manual_seed(0)
    return TRANSFORMS[transform](BRIDGED[name].build())


def batches_of(name: str, step: int, count: int) -> list[tuple]:
    generator = torch.Generator().manual_seed(step)
    return [BRIDGED[name].batch(generator, size) for size in SIZES[:count]]


def loss_of(name: str, model: nn.Module, batch: tuple) -> torch.Tensor:
    return BRIDGED[name].loss(model, batch)


def count_of(name: str, batch: tuple) -> int:
    return BRIDGED[name].count(batch)


def optimizer_of(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.SGD(trained, lr=0.1) if kind == "sgd" else torch.optim.AdamW(trained, lr=1e-3)


@functools.cache
def plain(name: str, transform: str, kind: str, steps: int, count: int) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Weights after `steps` of plain torch in this process, and gradient norms."""
    torch.set_num_threads(1)
    model = made(name, transform)
    optimizer, norms = optimizer_of(model, kind), []
    for step in range(steps):
        batches = batches_of(name, step, count)
        total = sum(count_of(name, batch) for batch in batches)
        for batch in batches:
            (loss_of(name, model, batch) / total).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    return {key: p.detach().clone() for key, p in model.named_parameters()}, norms


def bridged(
    rank: int,
    world: int,
    name: str,
    transform: str,
    kind: str,
    steps: int,
    layout: str,
    replicas: int = 1,
    backend: str = "auto",
    options: dict[str, Any] | None = None,
    evaluates: bool = False,
    automatic: bool = False,
    device: str = "cpu",
) -> tuple[dict[str, torch.Tensor], list[float], list[float]]:
    """Whole weights after `steps` under `use_odc`, gradient norms, and losses of evaluations between the minibatches,
    one more on each higher rank.
    """
    from torch.distributed.device_mesh import init_device_mesh

    model = made(name, transform).to(device)
    mesh = init_device_mesh(device, (world,))
    if replicas > 1:
        mesh = init_device_mesh(device, (replicas, world // replicas), mesh_dim_names=("replicate", "shard"))
    LAYOUTS[layout](model, mesh=mesh, **(options or {}))
    assert use_odc(model, automatic=automatic, backend=backend) is model
    optimizer, norms, losses = optimizer_of(model, kind), [], []
    deal = DEALS[world]
    for step in range(steps):
        batches = [tuple(part.to(device) for part in each) for each in batches_of(name, step, sum(map(len, deal)))]
        mine = [batches[index] for index in deal[rank]]
        if automatic:
            total = sum(count_of(name, batch) for batch in batches)
            for batch in mine:
                (loss_of(name, model, batch) * world / total).backward()
        else:
            with minibatch(model, tokens=sum(count_of(name, batch) for batch in mine)) as mb:
                for batch in mine:
                    (loss_of(name, model, batch) / mb.tokens).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor().item())
        optimizer.step()
        optimizer.zero_grad()
        for _ in range(rank + 1 if evaluates else 0):
            with torch.no_grad():
                losses.append(loss_of(name, model, batches[0]).item())
    read = {key: value.cpu() for key, value in full_parameters(model)}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    weights = {key: whole(parameter).cpu() for key, parameter in model.named_parameters()}
    for key, weight in weights.items():
        assert torch.equal(read[key], weight.to(read[key].dtype)), f"full_parameters differs in {key}"
    return weights, norms, losses


def sharded(**options: Any) -> nn.Module:
    """A small model of torch's fully_shard."""
    model = made("both branches", "")
    LAYOUTS["blocks"](model, **options)
    return model


def under_odc(**options: Any) -> nn.Module:
    """The same under `use_odc`."""
    return use_odc(sharded(), **options)


def exploding(model: nn.Module, here: bool) -> Iterator[None]:
    """Its first block raises in the forward, and then in the backward, if `here`."""

    def explode(*_: Any) -> None:
        raise ValueError("exploded")

    for register in (nn.Module.register_forward_pre_hook, nn.Module.register_full_backward_pre_hook):
        hook = register(model.blocks[0], explode)
        if not here:
            hook.remove()
        yield
        hook.remove()


def train(model: nn.Module, batches: list[tuple], name: str = "both branches") -> None:
    """One minibatch."""
    with minibatch(model, tokens=sum(count_of(name, batch) for batch in batches)) as mb:
        for batch in batches:
            (loss_of(name, model, batch) / mb.tokens).backward()
