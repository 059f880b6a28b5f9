"""Containers that go in and out of a unit are taken apart and made again as pytree does, only faster."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from odc_triton.engine.forward import _map, _replace, tensors_in

A, B, C = (torch.full((1,), float(value)) for value in range(3))
Pair = namedtuple("Pair", "first second")


@dataclass
class Record:
    value: Any
    nothing: None = None


CASES = {
    "a tensor": A,
    "no tensor": (None, 3, "text", 2.0, True, (), [], {}),
    "tuple, list, dict": (A, [B, {"c": C, "n": None}], 1),
    "named tuple": Pair(A, [B]),
    "ordered dict of them": OrderedDict(second=(A, Pair(B, 1)), first={"c": C}),
    "an unknown object": (A, object(), torch.Size([2])),
}


@pytest.mark.parametrize("value", CASES.values(), ids=CASES)
def test_as_pytree(value: Any) -> None:
    def change(leaf: Any) -> Any:
        return id(leaf) if isinstance(leaf, torch.Tensor) else ("leaf", leaf)

    assert _map(change, value) == pytree.tree_map(change, value)
    tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    assert [*map(id, tensors_in(value))] == [*map(id, tensors)]
    replaced = _replace(value, {id(tensor): str(tensor) for tensor in tensors}, ())
    assert replaced == pytree.tree_map_only(torch.Tensor, str, value)
    assert type(replaced) is (type(value) if not isinstance(value, torch.Tensor) else str)


def test_dataclasses_and_kept_containers() -> None:
    value = (Record([A]), Record(B), {"c": C})
    assert [*map(id, tensors_in(value))] == [id(A), id(B), id(C)]
    assert [*map(id, tensors_in(value, (list, dict)))] == [id(B)]
    first, second, third = _replace(value, {id(A): 0, id(B): 1}, (list, dict))
    assert (first is value[0], second, third is value[2]) == (True, Record(1), True)


def test_a_container_is_freed_with_its_last_reference() -> None:
    """Not when Python collects cycles: a model's output has its logits."""
    value = OrderedDict(logits=torch.ones(1))
    logits = weakref.ref(value["logits"])
    gc.disable()
    try:
        assert len([*tensors_in(value)]) == 1
        assert _map(id, value).keys() == {"logits"}
        del value
        assert logits() is None
    finally:
        gc.enable()
