"""The frozen base of a model with PEFT's adapters: checkpoints name it, and don't contain it.

A checkpoint has the base's name and a digest of its weights in memory, so adapters are not loaded onto another one. The
digest is of a sum over elements, to which any number of ranks add theirs. It detects mistakes, not forgeries.
"""

from __future__ import annotations

import hashlib
import json
import re
from functools import partial
from pathlib import Path

import torch
from torch import nn

from ..base.errors import CheckpointDiffers
from ..base.untyped import untyped
from ..engine.borrowed import BorrowedShard
from ..engine.module import below_wrappers
from ..engine.parameter import ShardedParameter
from ..engine.shard import HeapShard
from ..nn.operand import kept_dtype
from .adapter import STARTS_AS_BASE, frozen_ids
from .parameters import sharded_parameters

FILE = "base.json"  # in a checkpoint without the frozen weights
ADAPTER = re.compile(r"\.(lora_|modules_to_save\.)")  # in the names of PEFT's own parameters
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BLOCK = 2**20  # elements summed at a time


def base_name(model: nn.Module) -> str | None:
    """The folder or hub id that PEFT's adapters in `model` belong to; None for other models and random bases."""
    configs = getattr(model, "peft_config", None) or {}
    return next((config.base_model_name_or_path for config in configs.values()), None) or None


def frozen_base(model: nn.Module, *, as_before: bool = False) -> dict[str, ShardedParameter]:
    """The parameters below PEFT's adapters that are not trained, and borrowed ones, by each of their names.

    Without what no file fills: the score of which a classifier's adapter trains a copy. `as_before`: with it, and by
    names with torch's wrappers, as older versions wrote checkpoints.
    """
    parameters = sharded_parameters(model)
    frozen = frozen_ids(model) if getattr(model, "peft_config", None) else set()
    if not as_before:
        copied = [untyped(each).original_module for each in model.modules() if STARTS_AS_BASE in vars(each)]
        frozen -= {id(value) for each in copied for value in each.parameters()}
    frozen |= {key for key, each in parameters.items() if isinstance(each.shard, BorrowedShard)}
    return {
        name if as_before else below_wrappers(name): parameters[id(value)]
        for name, value in model.named_parameters(remove_duplicate=False)
        if id(value) in frozen and id(value) in parameters
    }


def frozen_bases(model: nn.Module) -> list[dict[str, ShardedParameter]]:
    """`frozen_base`, and that of older versions if it is another."""
    now, before = frozen_base(model), frozen_base(model, as_before=True)
    return [now] if now.keys() == before.keys() else [now, before]


def own_sum(base: dict[str, ShardedParameter], rank: int, world: int) -> int:
    """This rank's part of a sum over all elements, modulo 2⁶⁴. Not of what is packed, which differs in rounding between
    devices, and numbers of threads."""

    def of(name: str, shard: HeapShard) -> int:
        first, values = shard.values_of(rank, world)
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") << 30  # other places for each name
        return _sum(values, seed + first)

    total = 0
    for name, shard in ((name, each.shard) for name, each in base.items() if kept_dtype(each.leaf) is None):
        kept = isinstance(shard, BorrowedShard)
        total += shard.kept_sum(name, rank, world, partial(of, name, shard)) if kept else of(name, shard)
    return total % 2**64


def _sum(values: torch.Tensor, first: int) -> int:
    """The sum of each element's bits times an odd number determined by its place; `first`: the first one's place."""
    bits = values.detach().reshape(-1).view(_BITS[values.element_size()])
    total = 0
    for start in range(0, len(bits), _BLOCK):
        block = bits[start : start + _BLOCK]
        places = torch.arange(first + start, first + start + len(block), device=bits.device)
        factors = places.mul_(-7046029254386353131)  # 2⁶⁴ / golden ratio: products wrap around
        factors ^= factors >> 32
        total += int((factors | 1).mul_(block).sum())
    return total


def described(name: str, base: dict[str, ShardedParameter], sums: list[int]) -> dict[str, str]:
    """The content of `FILE`: the base's name, and a digest of names, shapes, dtypes and all ranks' `own_sum`."""
    shapes = [[key, list(each.spec.whole_shape), each.shard.saved_dtype] for key, each in sorted(base.items())]
    return {"name": name, "digest": hashlib.sha256(json.dumps([shapes, sum(sums) % 2**64]).encode()).hexdigest()}


def require_same(
    checkpoint: Path, bases: list[dict[str, ShardedParameter]], sums: list[list[int]]
) -> dict[str, ShardedParameter]:
    """The one of `bases` that is the checkpoint's. Raises CheckpointDiffers if none is. `sums`: by rank, of each."""
    saved = json.loads((checkpoint / FILE).read_bytes())
    for number, base in enumerate(bases):
        if saved == described(saved["name"], base, [theirs[number] for theirs in sums]):
            return base
    raise CheckpointDiffers(
        f"the checkpoint has only adapters, of {saved['name']}, and the frozen weights of this model differ: "
        f"load that base, with the same adapters and dtype, before the checkpoint. Nothing was overwritten."
    )
