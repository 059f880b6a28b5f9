"""Numbers by which custom operators name objects, which they can't take as arguments.

[Note: handles] A handle is an int64 tensor [1] on the CPU that holds such a number. `torch.compile` treats it as one
more input of the graph, so one graph serves all layers of a kind. An operator that writes into shared memory declares
the handle as mutated, though it never writes to it: so it is not removed as useless, nor moved or made twice, and if it
is given a copy, as under functionalization, the copy holds the same number. Given a shard itself, it would be run on a
copy of it, which would be written back over what peers had added meanwhile. An operator's backward keeps its handles
aside from what autograd saves, which would take the same weight's second use for a change of it.

The numbers are the process's only state here: an object is forgotten when nothing else holds it.
"""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .on_owners import OnOwners

_numbers = itertools.count(1)
_objects: weakref.WeakValueDictionary[int, OnOwners] = weakref.WeakValueDictionary()


def handle_of(target: OnOwners) -> torch.Tensor:
    """A new handle of `target`."""
    number = next(_numbers)
    _objects[number] = target
    return torch.tensor([number], dtype=torch.int64, device="cpu")


def resolve(handle: torch.Tensor) -> OnOwners:
    """What the handle names. Raises RuntimeError if it is gone."""
    target = _objects.get(int(handle))
    if target is None:
        raise RuntimeError("a layer's weight belongs to a sharded model that is gone; keep the model that was sharded")
    return target
