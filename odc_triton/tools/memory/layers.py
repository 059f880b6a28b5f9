"""What layers take in ways of their own: weights that are packed, and those that are read from their owners."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from ...base.untyped import untyped
from ...comm.layout import ParameterSpec, shard_rows
from ...engine.kept import rows_in_slot, rows_to_keep
from ...nn.choice import Choice, choose
from ...nn.experts import are_experts
from ...sharding.collect import FoundParameter, dtype_name

FORMATS = ("nf4", "int8")


def stored(
    entry: FoundParameter, plain: ParameterSpec, quantize: str | None, kept: set[int]
) -> tuple[list[ParameterSpec], int]:
    """What stands for a parameter in the heap, and the bytes of its dequantised value, 0 if it is not packed.

    `quantize`: packs frozen weights of linear layers and experts, but those whose ids are in `kept`.
    """
    value, homes = untyped(entry.parameter), [untyped(module) for module, *_ in entry.places]
    state = getattr(homes[0][0] if isinstance(homes[0], ParametrizationList) else value, "quant_state", None)
    if state is not None or value.dtype == torch.int8:  # a prepared layer's state is found as a module
        states = (
            [] if state is None or isinstance(untyped(state), nn.Module) else [state, *filter(None, [state.state2])]
        )
        beside = [each for of in states for each in vars(of).values()] + [getattr(value, "SCB", None)]
        tensors = [value, *(each for each in beside if isinstance(each, torch.Tensor))]
        sizes = [(tuple(each.shape) or (1,), dtype_name(each.dtype)) for each in tensors]
        dequantized = 2 * value.numel() if state is None else math.prod(state.shape) * state.dtype.itemsize
    elif quantize is None or value.requires_grad:
        return [plain], 0
    elif value.ndim == 2 + all(map(are_experts, homes)) and id(value) not in kept and _are_packed(homes):
        sizes = _packed(plain.shape, quantize)
        dequantized = value.numel() * element_bytes(plain.compute_dtype)
    else:
        return [replace(plain, master_dtype=plain.compute_dtype)], 0  # as `from_pretrained` in this dtype
    frozen = replace(plain, reduce_dtype=None)
    return [replace(frozen, shape=shape, master_dtype=d, compute_dtype=d) for shape, d in sizes], dequantized


def element_bytes(dtype: str) -> int:
    return getattr(torch, dtype).itemsize


def _are_packed(homes: list[nn.Module]) -> bool:
    return all(are_experts(each) or isinstance(each, nn.Linear) for each in homes)


def _packed(shape: tuple[int, ...], quantize: str) -> list[tuple[tuple[int, ...], str]]:
    """bitsandbytes' tensors. int8: elements, an absmax per row. nf4: pairs of elements, an absmax per 64; the code, an
    absmax per 256 of these, their code, and an offset.
    """
    if quantize == "int8":
        return [(shape, "int8"), (shape[:-1], "float32")]
    pairs, blocks = -(-math.prod(shape) // 2), -(-math.prod(shape) // 64)
    floats = [((n,), "float32") for n in (16, -(-blocks // 256), 256, 1)]
    return [((pairs, 1), "uint8"), ((blocks,), "uint8"), *floats]


def _how(entry: FoundParameter, backend: str) -> Choice | None:
    """How its operator runs, if it has several ways, as linear layers and experts have."""
    module: Any = entry.places[0][0]
    if (operator := getattr(module, "operator", None)) is None:
        return None
    return choose(operator, shape=tuple(entry.parameter.shape), tokens=1, device_type=backend, given=module.choice)


def makes_gradient(entry: FoundParameter, backend: str) -> bool:
    """Of a parameter that is read on demand. On a GPU plain torch can't add to owners while others' kernels do."""
    how = _how(entry, backend)
    return how is not None and (how.wgrad == "whole" or (how.backend, backend) == ("eager", "cuda"))


def other_experts_bytes(found: list[tuple[FoundParameter, ParameterSpec]], world: int, budget_bytes: int) -> int:
    """Of experts that are read on demand on a GPU, where autograd runs backwards in a thread of its own."""
    others, row_bytes, slots = [], [], {}
    for entry, spec in found:
        itemsizes = [0 if d is None else element_bytes(d) for d in (spec.compute_dtype, spec.reduce_dtype)]
        values, sums = (math.prod(spec.shape[1:]) * itemsize for itemsize in itemsizes)
        others.append(spec.shape[0] - shard_rows(spec.shape[0], world, 0)[1])
        row_bytes.append((values, sums))
        how = _how(entry, "cuda")
        if how is not None and how.source == "staged" and len(spec.shape) > 2:  # biases are read in place
            rows = rows_in_slot(values) if how.backend == "triton" else 1
            slots[spec.shape[1:], spec.compute_dtype, rows] = 2 * 2 * rows * values
    kept = zip(rows_to_keep(others, row_bytes, budget_bytes), row_bytes, strict=True)
    return sum(slots.values()) + sum(math.prod(pair) for each in kept for pair in zip(*each, strict=True))
