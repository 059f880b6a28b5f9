"""Checks that a model computes the same with our layers as with its own.

Our layers run without ranks, on parameters sharded over owners within this process (`LocalShards`).
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from odc_kernels.peers import ALL, PeerShards, rows_per_owner, shards_of
from odc_kernels.staged import StagedWeight, Staging

from ..base.errors import OdcError
from ..base.untyped import untyped
from .choice import TABLE
from .modules import LMHead
from .operand import AddRows, ReadsOnDemand, add_rows, handle_of, in_turn, is_sharded
from .replace import restore_layers

_OWNERS = 2
# Relative to the gradient's norm: sums have another order, in the summands' precision.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


@dataclass(frozen=True, kw_only=True)
class Verified:
    """The result of `verify`.

    loss, plain_loss: with our layers, and with the model's own.
    worst: name and relative difference of the gradient that differs most.
    gradients: how many were compared.
    """

    loss: float
    plain_loss: float
    worst: tuple[str, float]
    gradients: int

    def __str__(self) -> str:
        name, difference = self.worst
        if difference == 0:
            return f"loss {self.loss:.6g} and all {self.gradients} gradients equal those of its own layers, bit for bit"
        return (
            f"loss {self.loss:.6g}, with its own layers {self.plain_loss:.6g}; of {self.gradients} gradients, that of "
            f"{name} differs most, by {difference:.1e}"
        )


def verify(
    model: nn.Module,
    batch: Mapping[str, Any],
    *,
    loss: Callable[[nn.Module, Mapping[str, Any]], torch.Tensor] | None = None,
) -> Verified:
    """Compares the loss and every gradient of a model that `replace_layers` changed with those of its own layers.

    Call it before `fully_shard`. Our layers read their weights from two owners in this process and add the gradients to
    them, by the same operators as after `fully_shard`. Both runs use the same random numbers. The model and its
    gradients don't change; it temporarily needs memory for a copy of the model, and two of our layers' weights.

    batch: the model's inputs by name, with `labels`.
    loss: computes it from model and batch, if it is not the model's own.

    Returns both losses, and the gradient that differs most. Raises OdcError naming the first difference, ValueError if
    there is nothing to compare.
    """
    if any(is_sharded(module) for module in model.modules()):
        raise ValueError("verify comes before fully_shard: it needs whole parameters")
    if not isinstance(batch, Mapping):
        raise ValueError(f"batch is a {type(batch).__name__}; give a mapping such as {{'input_ids': …, 'labels': …}}")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError("verify needs weights with values: the model is on meta; load or initialise it first")
    for name, module in model.named_modules():
        if isinstance(module, LMHead) and not module.training:
            raise ValueError(
                f"the head {name} is in evaluation mode, in which it returns plain logits and can't be verified: call "
                f"model.train() first (from_pretrained returns a model in evaluation mode)"
            )
    plain = copy.deepcopy(model)
    if restore_layers(plain) == 0:
        raise ValueError("none of the model's layers is replaced: call replace_layers first")
    measure = loss or _own_loss
    with contextlib.ExitStack() as stack:
        local = {
            name: stack.enter_context(LocalShards(parameter, _OWNERS)) for name, parameter in _on_demand(model).items()
        }
        value, gradients = _gradients(model, batch, measure)
    for name, shards in local.items():
        if shards.gradient is not None:
            gradients[name] = shards.gradient + gradients.get(name, 0.0)
    plain_value, plain_gradients = _gradients(plain, batch, measure)
    worst = ("", 0.0)
    floor = 1e-6 * max((float(gradient.norm()) for gradient in plain_gradients.values()), default=0.0)
    tolerance = max(_TOLERANCE.get(parameter.dtype, 1e-4) for parameter in model.parameters())
    if not abs(value - plain_value) <= tolerance * max(abs(plain_value), 1.0):
        raise OdcError(f"the loss is {value:.8g}, but with the model's own layers {plain_value:.8g}")
    for name, want in plain_gradients.items():
        got = gradients.get(name)
        if got is None:
            raise OdcError(f"{name} has no gradient, but with the model's own layers it has one")
        difference = float((got.float() - want.float()).norm()) / max(float(want.float().norm()), floor, 1e-30)
        if not difference <= tolerance:
            raise OdcError(
                f"the gradient of {name} differs by {difference:.1e} relative to its norm (allowed: {tolerance:.0e}); "
                f"loss {value:.8g}, with the model's own layers {plain_value:.8g}"
            )
        worst = max(worst, (name, difference), key=lambda pair: pair[1])
    if more := gradients.keys() - plain_gradients.keys():
        raise OdcError(f"{sorted(more)[0]} has a gradient, but with the model's own layers it has none")
    return Verified(loss=value, plain_loss=plain_value, worst=worst, gradients=len(plain_gradients))


def _on_demand(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that our layers may read from their owners, by name."""
    ours = {
        id(p) for module in model.modules() if isinstance(module, ReadsOnDemand) for p in module._parameters.values()
    }
    return {name: parameter for name, parameter in model.named_parameters() if id(parameter) in ours}


def _own_loss(model: nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
    loss = getattr(model(**batch), "loss", None)
    if loss is None:
        raise ValueError(f"the model returned no loss for {sorted(batch)}; add labels, or give loss=")
    return loss


def _gradients(
    model: nn.Module, batch: Mapping[str, Any], measure: Callable[[nn.Module, Mapping[str, Any]], torch.Tensor]
) -> tuple[float, dict[str, torch.Tensor]]:
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not named:
        raise ValueError("none of the model's parameters trains: there is no gradient to compare")
    devices = {parameter.device for parameter in named.values() if parameter.is_cuda}
    with torch.random.fork_rng(devices=list(devices)):
        torch.manual_seed(0)
        loss = measure(model, batch)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise ValueError(f"loss= returned {shape}; it must return a scalar tensor")
    if not loss.isfinite():
        raise ValueError(f"the loss is {loss.item()}: does the batch have a label that is not ignored?")
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return float(loss.detach()), {name: g for name, g in zip(named, found, strict=True) if g is not None}


class LocalShards:
    """A `ShardedOperand` within one process, to check operators without ranks.

    `leaf`: an ordinary parameter [N, ...]; within `with`, operators read a copy of it from `world` owners and add its
    gradient to `gradient`, fp32 [N, ...], instead of returning it to autograd. `by_kernels`: kernels may add it,
    by default on a GPU.
    """

    def __init__(self, leaf: torch.Tensor, world: int = 1, *, by_kernels: bool | None = None) -> None:
        self.leaf, self.world, self.shape, self.dtype = leaf, world, tuple(leaf.shape), leaf.dtype
        self.table = TABLE
        self._shards = shards_of(leaf.detach(), world)
        wide = torch.promote_types(leaf.dtype, torch.float32)
        self._gradient_shards = shards_of(torch.zeros_like(leaf, dtype=wide, requires_grad=False), world)
        self._each = rows_per_owner(self.shape[0], world)
        self._staging = Staging()
        self._by_kernels = leaf.is_cuda if by_kernels is None else by_kernels
        self._touched = False

    def __enter__(self) -> LocalShards:
        untyped(self.leaf)._odc_handle = handle_of(self)
        return self

    def __exit__(self, *_: object) -> None:
        del untyped(self.leaf)._odc_handle

    @property
    def gradient(self) -> torch.Tensor | None:
        """The sum of all added gradients; None without any."""
        return torch.cat(self._gradient_shards) if self._touched else None

    @property
    def compute_peers(self) -> PeerShards:
        return PeerShards.of(self._shards, shape=self.shape, aligned=self.leaf.is_cuda, near=ALL)

    def parts(self, source: str) -> list[torch.Tensor]:
        return self._shards if source == "direct" else [self.read()]

    def read(self) -> torch.Tensor:
        return torch.cat(self._shards)

    def pull(self) -> StagedWeight:
        return self._staging.pull(self.compute_peers)

    def row_peers(self) -> PeerShards:
        return self.compute_peers

    def copied(self, rows: Sequence[int] | None) -> Iterator[tuple[int, torch.Tensor]]:
        if rows is None:
            yield from ((self.first_row(owner), shard) for owner, shard in enumerate(self._shards) if len(shard))
        for owner, row in in_turn(self, rows or ()):
            yield row, self._shards[owner][row - self.first_row(owner) :][:1]

    def first_row(self, owner: int) -> int:
        return min(owner * self._each, self.shape[0])

    def owners_from_own(self) -> Iterator[int]:
        return (owner for owner in range(self.world) if len(self._shards[owner]))

    def wants_gradient(self) -> bool:
        return True  # the check always needs it

    def open_sink(self) -> PeerShards | AddRows:
        self._touched = True
        if self._by_kernels:
            return PeerShards.of(self._gradient_shards, shape=self.shape, aligned=self.leaf.is_cuda, near=ALL)
        return self._add_rows

    @torch.no_grad()
    def _add_rows(self, owner: int, at: int | torch.Tensor, rows: torch.Tensor) -> None:
        add_rows(self._gradient_shards[owner], at, rows)

    @torch.no_grad()
    def add_gradient(self, gradient: torch.Tensor | None) -> None:
        if gradient is not None:
            self._touched = True
            rows = gradient.split([len(shard) for shard in self._gradient_shards])
            for shard, own in zip(self._gradient_shards, rows, strict=True):
                shard.add_(own)
