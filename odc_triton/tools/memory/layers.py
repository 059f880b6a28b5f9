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

Sizes = list[tuple[tuple[int, ...], torch.dtype]]  # shapes and dtypes of tensors
FORMATS = ("nf4", "int8")
_BLOCK, _NESTED_BLOCK = 64, 256  # bitsandbytes' own: elements per absmax, and of these per nested one


class Packing:
    """How a frozen weight of `model` lies in the heap: packed as it is, or as `quantize` says, or plain."""

    def __init__(self, model: nn.Module, quantize: str | None) -> None:
        self._quantize = quantize
        head = getattr(model, "get_output_embeddings", lambda: None)()
        self._kept = set() if head is None else {id(parameter) for parameter in head.parameters()}

    def stored(self, entry: FoundParameter, plain: ParameterSpec) -> tuple[list[ParameterSpec], int]:
        """The tensors that stand for a parameter, and the bytes of its dequantised value: 0 if it is not packed."""
        value, home = untyped(entry.parameter), untyped(entry.places[0][0])
        state = getattr(home[0] if isinstance(home, ParametrizationList) else value, "quant_state", None)
        if state is not None:
            nested = (state.state2.absmax, state.state2.code, state.offset) if state.nested else ()
            # Those of a prepared layer are parameters, found by themselves.
            tensors = _sizes(value, *(() if isinstance(state, nn.Module) else (state.absmax, state.code, *nested)))
            dequantized = math.prod(state.shape) * state.dtype.itemsize
        elif value.dtype == torch.int8:
            scale = getattr(value, "SCB", None)
            tensors, dequantized = _sizes(value, *(() if scale is None else (scale,))), 2 * value.numel()
        elif self._packs(entry):
            tensors = _nf4(plain.shape) if self._quantize == "nf4" else _int8(plain.shape)
            dequantized = value.numel() * getattr(torch, plain.compute_dtype).itemsize
        else:
            return [plain], 0
        how: dict[str, Any] = {"reduce_dtype": None, "is_scalar": False}
        named = [(shape, dtype_name(dtype)) for shape, dtype in tensors]
        return [replace(plain, shape=n, master_dtype=d, compute_dtype=d, **how) for n, d in named], dequantized

    def _packs(self, entry: FoundParameter) -> bool:
        """As transformers' BitsAndBytesConfig does by default, and a layer's experts."""
        value, modules = entry.parameter, [module for module, *_ in entry.places]
        if self._quantize is None or value.requires_grad or value.ndim < 2 or id(value) in self._kept:
            return False
        return all(isinstance(each, nn.Linear) or (value.ndim == 3 and are_experts(each)) for each in modules)


def _sizes(*tensors: torch.Tensor) -> Sizes:
    return [(tuple(each.shape) or (1,), each.dtype) for each in tensors]


def _nf4(shape: tuple[int, ...]) -> Sizes:
    """Packed elements; absmax, itself in blocks; the code; nested absmax, its code and offset."""
    elements = math.prod(shape)
    blocks = -(-elements // _BLOCK)
    floats = [(16,), (-(-blocks // _NESTED_BLOCK),), (256,), (1,)]
    packed = [((-(-elements // 2), 1), torch.uint8), ((blocks,), torch.uint8)]
    return [*packed, *((each, torch.float32) for each in floats)]


def _int8(shape: tuple[int, ...]) -> Sizes:
    """Elements, and an absmax per row."""
    return [(shape, torch.int8), ((math.prod(shape[:-1]),), torch.float32)]


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
        itemsizes = [0 if d is None else getattr(torch, d).itemsize for d in (spec.compute_dtype, spec.reduce_dtype)]
        values, sums = (math.prod(spec.shape[1:]) * itemsize for itemsize in itemsizes)
        others.append(spec.shape[0] - shard_rows(spec.shape[0], world, 0)[1])
        row_bytes.append((values, sums))
        how = _how(entry, "cuda")
        if how is not None and how.source == "staged" and len(spec.shape) > 2:  # biases are read in place
            rows = rows_in_slot(values) if how.backend == "triton" else 1
            slots[spec.shape[1:], spec.compute_dtype, rows] = 2 * 2 * rows * values
    kept = zip(rows_to_keep(others, row_bytes, budget_bytes), row_bytes, strict=True)
    return sum(slots.values()) + sum(math.prod(pair) for each in kept for pair in zip(*each, strict=True))
