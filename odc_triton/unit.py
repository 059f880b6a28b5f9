"""A unit: a module whose parameters become whole together, for as long as its forward or a backward runs."""

from __future__ import annotations

import sys
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
        self._hooks = [
            module.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True),
            module.register_forward_hook(self._after_forward, always_call=True),
        ]
        self._outer_exceptions: list[BaseException | None] = []
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

    def hold(self) -> None:
        self._held = True
        self.make_whole()

    def release(self) -> None:
        self._held = False
        self.make_sharded()

    def reset(self) -> None:
        """Forgets uses that an exception left open (KeyboardInterrupt calls no forward hooks)."""
        self._uses, self._held = 0, False
        self._outer_exceptions.clear()
        self.make_sharded()

    def enter(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        self.engine.forward_begins()
        self._outer_exceptions.append(sys.exc_info()[1])
        self._uses += 1
        self.make_whole()
        dtype = self.policy.param_dtype
        if dtype is not None and self.policy.cast_forward_inputs:
            args, kwargs = pytree.tree_map(lambda value: _cast(value, dtype), (args, kwargs))
        return args, kwargs

    def leave(self, output: Any, error: BaseException | None) -> Any:
        self._uses -= 1
        self.make_sharded()
        if error is None:
            if self.policy.output_dtype is not None:
                output = pytree.tree_map(lambda value: _cast(value, self.policy.output_dtype), output)
            self.engine.watch_backward(output)
        self.engine.forward_ends(error)
        return output

    def _before_forward(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return self.enter(args, kwargs)

    def _after_forward(self, module: nn.Module, args: tuple, output: Any) -> Any:
        if not self._outer_exceptions:  # our own pre-hook raised: nothing was entered
            return None
        outer = self._outer_exceptions.pop()
        error = sys.exc_info()[1]  # torch calls this hook from its `except` when the forward raised
        return self.leave(output, None if error is outer else error)

    def wrap_method(self, method: Callable) -> Callable:
        """`method` of the module, run as if it were its forward."""

        def as_forward(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = self.enter(args, kwargs)
            self._outer_exceptions.pop()
            try:
                output = method(*args, **kwargs)
            except BaseException as error:
                self.leave(None, error)
                raise
            return self.leave(output, None)

        return as_forward
