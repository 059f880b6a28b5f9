"""A unit: a module whose parameters become whole together, for as long as its forward or a backward runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils import _pytree as pytree

from .sharded_param import ShardedParameter

if TYPE_CHECKING:
    from .engine import Engine


@dataclass(frozen=True, slots=True)
class Slot:
    """One place in the module tree where a parameter is registered. Tied parameters have several."""

    module: nn.Module
    attribute: str
    parameter: ShardedParameter

    def put(self, value: nn.Parameter) -> None:
        # Modules such as nn.LSTM override __setattr__ to keep lists of their weights: they must hear of it.
        if type(self.module).__setattr__ is nn.Module.__setattr__:
            self.module._parameters[self.attribute] = value
        else:
            setattr(self.module, self.attribute, value)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.to(dtype)
    return value


class Unit:
    """Swaps the sharded DTensors of its slots for the whole tensors and back, around the module's forward.

    Swapping works on the *unit*, never on single layers, as parents read their children's weights
    (`nn.TransformerEncoderLayer` does). Whole tensors are zero-copy views on the CPU backend, so this is a matter
    of a few dictionary entries.
    """

    def __init__(
        self, *, name: str, module: nn.Module, slots: list[Slot], policy: MixedPrecisionPolicy, engine: Engine
    ) -> None:
        self.name, self.module, self.slots, self.policy = name, module, slots, policy
        self.engine = engine
        self._uses = 0  # forwards of this unit that run now
        self._held = False  # by unshard()
        self._whole = False
        for slot in slots:
            slot.put(slot.parameter.sharded)

    def make_whole(self) -> None:
        if not self._whole:
            self._whole = True
            for slot in self.slots:
                slot.put(slot.parameter.leaf)

    def make_sharded(self) -> None:
        """Back to DTensors, unless a forward, a backward or `unshard()` still needs the whole tensors."""
        if self._whole and not (self._uses or self._held or self.engine.in_backward):
            self._whole = False
            for slot in self.slots:
                slot.put(slot.parameter.sharded)

    def check_places(self) -> None:
        """Raises when something registered another parameter at one of the unit's places."""
        for slot in () if self._whole else self.slots:
            if slot.module._parameters.get(slot.attribute) is not slot.parameter.sharded:
                raise RuntimeError(
                    f"{slot.parameter.name} was replaced by another parameter after fully_shard. Write its values into "
                    f"the sharded one with copy_() instead."
                )

    def hold(self) -> None:
        self._held = True
        self.make_whole()

    def release(self) -> None:
        self._held = False
        self.make_sharded()

    def reset(self) -> None:
        """Forgets `unshard()`, and uses that an interrupt between two lines left open."""
        self._uses, self._held = 0, False
        self.make_sharded()

    def run(self, call: Callable, args: tuple, kwargs: dict) -> Any:
        """`call(*args, **kwargs)` as a forward of this unit: its parameters are whole meanwhile.

        It stands around the module's `__call__` rather than in forward hooks, which an interrupt would skip.
        """
        self.engine.forward_begins()
        self._uses += 1
        try:
            self.make_whole()
            dtype = self.policy.param_dtype
            if dtype is not None and self.policy.cast_forward_inputs:
                args, kwargs = pytree.tree_map(lambda value: _cast(value, dtype), (args, kwargs))
            output = call(*args, **kwargs)
            if self.policy.output_dtype is not None:
                output = pytree.tree_map(lambda value: _cast(value, self.policy.output_dtype), output)
            self.engine.watch_backward(output)
        except BaseException as error:
            self._leave(error)
            raise
        self._leave(None)
        return output

    def _leave(self, error: BaseException | None) -> None:
        self._uses -= 1
        self.make_sharded()
        self.engine.forward_ends(error)

    def wrap_method(self, method: Callable) -> Callable:
        """`method` of the module, run as if it were its forward."""

        @functools.wraps(method)
        def as_forward(*args: Any, **kwargs: Any) -> Any:
            return self.run(method, args, kwargs)

        return as_forward
