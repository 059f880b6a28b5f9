"""A unit's states: what is registered on its modules, what takes memory, and what can't follow."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from odc_triton import fully_shard, minibatch
from odc_triton.engine.minibatch import end_minibatch
from odc_triton.engine.unit import KEPT, SHARDED
from tests.support import blocks

# (state, whether whole tensors take memory) of the root, block 0 and block 1, in the second microbatch and after it.
Seen = tuple[tuple[str, bool], ...]
GONE, AHEAD, FORWARD, STAYS = ("SHARDED", False), ("SHARDED", True), ("FORWARD", True), ("KEPT", True)
NEEDED, BACKWARD, HELD = ("BACKWARD", False), ("BACKWARD", True), ("HELD", True)
STATES: list[tuple[str, Seen]] = [
    ("before", (GONE, GONE, GONE)),
    ("forward of block 0", (FORWARD, FORWARD, AHEAD)),
    ("forward of block 1", (FORWARD, GONE, FORWARD)),
    ("after the forward", (STAYS, GONE, GONE)),
    ("backward of block 1", (BACKWARD, BACKWARD, BACKWARD)),  # block 0 is prefetched
    ("backward of block 0", (BACKWARD, BACKWARD, NEEDED)),
    ("after the backward", (GONE, GONE, GONE)),
    ("block 0 is unsharded", (GONE, HELD, GONE)),
    ("forward of block 0", (FORWARD, HELD, AHEAD)),
    ("forward of block 1", (FORWARD, HELD, FORWARD)),
    ("after the forward", (STAYS, HELD, GONE)),
    ("block 0 is resharded", (STAYS, GONE, GONE)),
    ("after the minibatch", (GONE, GONE, GONE)),
]


def _sharded() -> nn.Module:
    return fully_shard(blocks.build(), backend="cpu-sharded")


def _seen(model: nn.Module) -> Seen:
    units, seen = {unit.name: unit for unit in model._odc_engine.units}, []
    for unit in (units[name] for name in ("", "blocks.0", "blocks.1")):
        for slot in unit.slots:
            parameter = slot.parameter
            registered = parameter.sharded if unit.state is SHARDED else parameter.leaf
            assert slot.module._parameters[slot.attribute] is registered
        seen.append((unit.state.name, any(each.is_filled for each in unit.gathered)))
    return tuple(seen)


def test_what_is_registered_and_what_takes_memory() -> None:
    model, x, seen = _sharded(), blocks.batch(0).requires_grad_(), []

    def note(when: str) -> None:
        seen.append((when, _seen(model)))

    with minibatch(model, tokens=1):
        model(x).sum().backward()
        note("before")
        for index in range(2):
            block = model.blocks[index]
            block.register_forward_pre_hook(lambda *_, i=index: note(f"forward of block {i}"))
            block.register_full_backward_pre_hook(lambda *_, i=index: note(f"backward of block {i}"))
        loss = model(x).sum()
        note("after the forward")
        loss.backward()
        note("after the backward")
        model.blocks[0].unshard()
        note("block 0 is unsharded")
        model(x)
        note("after the forward")
        model.blocks[0].reshard()
        note("block 0 is resharded")
    note("after the minibatch")
    assert seen == STATES


def test_what_cannot_follow_is_refused() -> None:
    """A minibatch that ends inside of a forward; and by name, of a unit that nothing has used."""
    model, x = _sharded(), blocks.batch(0)
    handle = model.blocks[1].register_forward_hook(lambda *_: end_minibatch(model))
    with pytest.raises(RuntimeError, match=r"unit blocks\.1 is SHARDED, and the end of a forward was wanted"):
        minibatch(model, tokens=1).__enter__() and model(x)
    handle.remove()
    with pytest.raises(RuntimeError, match="unit of the root is SHARDED, and KEPT was wanted"):
        model._odc_unit._enter(KEPT)
    assert _seen(model) == (GONE, GONE, GONE)
    with minibatch(model, tokens=1):
        model(x).sum().backward()
    with torch.no_grad():
        model(x)
    assert _seen(model) == (GONE, GONE, GONE)
    assert not model._odc_engine.passes.in_forward
