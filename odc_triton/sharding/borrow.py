"""`fully_shard(base=)`: a model takes its frozen parameters from another, in whose ranks' memory they are."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..comm.grid import Grid
from ..comm.layout import ParameterSpec
from ..comm.memory.heap import SymmetricHeap
from ..engine.api import engine_of
from ..engine.borrowed import BorrowedShard
from ..engine.module import Engine, plain_class
from ..engine.shard import HeapShard
from ..nn.operand import kept_dtype
from .backend import Backend
from .collect import Description, FoundParameter

# What PEFT, checkpoint_wrapper and torch.compile add to the names of what they wrap.
_WRAPPERS = re.compile(
    r"^base_model\.model\.|\b(base_layer|token_adapter|original_module|_checkpoint_wrapped_module|_orig_mod)\."
)
_OF_PEFT = re.compile(r"\.(lora_|modules_to_save\.|token_adapter\.)")


@dataclass(frozen=True, kw_only=True)
class Loan:
    """Parameters of a model that are in the shards of `base`, with where each was `found`."""

    base: Engine
    found: list[FoundParameter]
    shards: list[BorrowedShard]

    @property
    def digest(self) -> str:
        """Equal on ranks that borrow the same."""
        names = " ".join(shard.name for shard in self.shards)
        return f"{len(self.shards)} parameters, {hashlib.sha256(names.encode()).hexdigest()[:16]}"

    def by_heap(self) -> list[tuple[SymmetricHeap, list[FoundParameter], list[BorrowedShard]]]:
        """Of the base, or of its blocks that were sharded before it."""
        found: dict[int, tuple[SymmetricHeap, list[FoundParameter], list[BorrowedShard]]] = {}
        for entry, shard in zip(self.found, self.shards, strict=True):
            _, entries, shards = found.setdefault(id(shard.heap), (shard.heap, [], []))
            entries.append(entry)
            shards.append(shard)
        return [*found.values()]


def plain(name: str) -> str:
    return _WRAPPERS.sub("", name)


def _require_base(base: Any, grid: Grid, device: Backend) -> Engine:
    """The engine of a `base` that a model over `grid` can borrow from. Raises TypeError, ValueError, RuntimeError."""
    engine = engine_of(base, "fully_shard(base=)")
    if trained := [shard.name for shard in engine.trainable()]:
        raise ValueError(
            f"base trains {trained[0]}: a base is frozen, call requires_grad_(False) on it before its fully_shard"
        )
    if outside := sorted({*grid.ranks} - {*engine.grid.ranks}):
        raise ValueError(f"ranks {outside} of the mesh have no part of base: shard it over all that train on it")
    if (engine.grid.mesh.device_type, engine.heap.apart) != (device.mesh_device, device.apart):
        raise ValueError(f"base is on {engine.grid.mesh.device_type!r} and this model would be on {device.name!r}")
    if grid.mesh.ndim > engine.grid.mesh.ndim:
        raise ValueError("mesh has two dimensions and base is sharded over one: give both the same")
    engine.refuse_broken()
    return engine


def borrow(base: nn.Module, described: Description, root: nn.Module, *, device: Backend, grid: Grid) -> Loan:
    """Takes what `base` has out of `described`: every frozen parameter, by its name below PEFT's and other wrappers.
    Persistent buffers get the base's values.

    Raises ValueError for a frozen parameter that the base does not have like that, and for one of the base's that
    trains here.
    """
    engine = _require_base(base, grid, device)
    engine.publication.wait()
    of = {id(each.sharded): each for each in engine.parameters}
    named = {plain(name): id(value) for name, value in base.named_parameters(remove_duplicate=False)}
    lenders = {name: of[key] for name, key in named.items() if key in of}
    loan = Loan(base=engine, found=[], shards=[])
    own: list[tuple[FoundParameter, ParameterSpec]] = []
    for entry, spec in zip(described.found, described.specs, strict=True):
        lender = next((lenders[name] for name in map(plain, entry.names) if name in lenders), None)
        if spec.reduce_dtype is not None:
            if lender is not None:
                raise ValueError(f"{entry.name} trains here, and base has it frozen: freeze it, or train an adapter")
            if entry.parameter.is_meta and _OF_PEFT.search(entry.name):
                raise ValueError(
                    f"{entry.name} is on the meta device, where PEFT can't give it its first values: add adapters by "
                    f"odc_triton.checkpoint.with_adapter in place of get_peft_model"
                )
            own.append((entry, spec))
            continue
        if lender is None and not named.keys().isdisjoint(map(plain, entry.names)):
            raise ValueError(f"{entry.name} is in base's ignored_params: give it in ignored_params here too")
        if lender is None:
            raise ValueError(
                f"{entry.name} is frozen and base, a {plain_class(base).__name__}, has no such parameter: call "
                f"fully_shard once, on the whole model, built as base is, and train all that base lacks"
            )
        theirs, mine = [(each.shape, each.compute_dtype) for each in (lender.spec, spec)]
        if theirs != mine:
            words = [f"{list(shape)} in {dtype}" for shape, dtype in (mine, theirs)]
            raise ValueError(
                f"{entry.name} is {words[0]} here and {words[1]} in base: give both models the same folder, "
                f"quantisation and mp_policy"
            )
        if grid.rank == 0 and not _has_values(lender.shard, entry.parameter):
            raise ValueError(
                f"{entry.name} has other values here than in base: PEFT's initialisation may have changed it (PiSSA, "
                f"OLoRA), or base is another model"
            )
        loan.found.append(entry)
        loan.shards.append(BorrowedShard(lender.shard, engine, spec, grid))
    described.found, described.specs = [entry for entry, _ in own], [spec for _, spec in own]
    _copy_buffers(base, root)
    return loan


def _has_values(lender: HeapShard, value: nn.Parameter) -> bool:
    """True if `value`, the whole tensor, has the lender's, or none yet. Of packed ones nothing is known: their bits
    depend on the machine.
    """
    if value.is_meta or kept_dtype(value) is not None:
        return True
    return torch.equal(whole := lender.read(), value.detach().to(whole))


def _copy_buffers(base: nn.Module, root: nn.Module) -> None:
    """Into those on the meta device: others have the values that the model was built with."""
    theirs = {plain(name): value for name, value in base.named_buffers()}
    for prefix, module in root.named_modules():
        for key in module._buffers.keys() - module._non_persistent_buffers_set:
            buffer = module._buffers[key]
            found = theirs.get(plain(f"{prefix}.{key}".removeprefix(".")))
            if buffer is None or found is None or not buffer.is_meta:
                continue
            if (found.shape, found.dtype) != (buffer.shape, buffer.dtype):
                mine, theirs = (f"{list(each.shape)} in {each.dtype}" for each in (buffer, found))
                raise ValueError(f"buffer {key} is {mine} here and {theirs} in base: cast parameters only")
            module._buffers[key] = found.clone()
