"""bitsandbytes' quantised layers, all of whose tensors become parameters that can be sharded.

weight          [P, 1] of 4-bit codes, or [N, K] of 8-bit ones
quant_state     of 4 bits: absmax [blocks], nested or not, its codes and offset. Now a submodule of the layer
state.scales    of 8 bits: [N], which bitsandbytes calls SCB. `state` is a submodule, too

The layers compute as before: what they read has its place and name. This file imports bitsandbytes: import it only for
a model that may have such layers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from bitsandbytes import MatmulLtState, functional
from bitsandbytes.nn import Int8Params, Linear4bit, Linear8bitLt, Params4bit
from bitsandbytes.nn.parametrize import Bnb4bitParametrization, _parametrized_state_dict_post_hook
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from ..base.untyped import untyped
from .operand import keep_dtype, kept_dtype

Read = Callable[[torch.Tensor], torch.Tensor]


class Blocks(nn.Module, untyped(functional.QuantState)):
    """A `QuantState` whose tensors are frozen parameters."""

    __hash__ = nn.Module.__hash__  # bitsandbytes compares values
    __eq__ = nn.Module.__eq__

    def __init__(self, of: functional.QuantState) -> None:
        super().__init__()
        for name, value in vars(of).items():
            if isinstance(value, functional.QuantState):
                self.add_module(name, Blocks(value))
            elif isinstance(value, torch.Tensor):  # a code may be one tensor for all layers, and units share nothing
                self.register_parameter(name, _frozen(value.clone() if name == "code" else value))
            else:
                setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        return _in_memory(found) if isinstance(found, nn.Parameter) else found

    def plain(self, read: Read) -> functional.QuantState:
        """With `read(parameter)` in the place of each parameter."""
        made = functional.QuantState(
            read(self.absmax), self.shape, read(self.code), self.blocksize, self.quant_type, self.dtype
        )
        if self.nested:
            made.offset, made.state2, made.nested = read(self.offset), self.state2.plain(read), True
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> functional.QuantState:
        if not memo:  # bitsandbytes gives a copy other tensors
            return self.plain(lambda value: value.detach().clone())
        made = memo[id(self)] = object.__new__(Blocks)
        untyped(made).__dict__ = copy.deepcopy(vars(self), memo)
        return made


class Rows(nn.Module, untyped(MatmulLtState)):
    """A `MatmulLtState` of a weight [N, K] of 8 bits, with a scale for each row. `whole`: as of the last forward."""

    __hash__ = nn.Module.__hash__
    __eq__ = nn.Module.__eq__

    def __init__(self, of: MatmulLtState, scales: torch.Tensor, dtype: torch.dtype | None) -> None:
        super().__init__()
        for name, value in vars(of).items():
            if name not in ("CB", "SCB"):
                setattr(self, name, value)
        self.scales = _frozen(scales)
        self.dtype = dtype  # of weights before they are packed

    CB = property(lambda self: _in_memory(vars(self)["whole"]).data)
    SCB = property(lambda self: self.scales)


def _in_memory(whole: nn.Parameter) -> nn.Parameter:
    """Raises RuntimeError for a whole parameter whose unit has freed it, where bitsandbytes would still read."""
    if not torch.compiler.is_compiling() and hasattr(whole, "_odc_handle") and not whole.untyped_storage().size():
        raise RuntimeError(
            "a quantised layer's weights were read after its unit had freed them: its forward must return tensors, so "
            "that the unit sees the backward"
        )
    return whole


def _frozen(value: torch.Tensor) -> nn.Parameter:
    parameter = nn.Parameter(value, requires_grad=False)
    keep_dtype(parameter, value.dtype)
    return parameter


def prepare(root: nn.Module, ignored: Collection[nn.Parameter] = ()) -> None:
    """Makes parameters of all tensors of `root`'s quantised layers, which their state dicts have under these names.

    `ignored`: weights whose layers stay as they are.
    Raises ValueError for a weight that is not quantised yet, and one that bitsandbytes has packed for inference.
    """
    for name, module in list(root.named_modules()):
        for key, hook in list(module._state_dict_hooks.items()):
            if getattr(hook, "func", None) is _parametrized_state_dict_post_hook:  # it would rename them
                del module._state_dict_hooks[key]
        weight: Any = module._parameters.get("weight", module._parameters.get("original"))
        if any(weight is each for each in ignored):
            continue
        if isinstance(weight, Params4bit):
            _prepare_4bit(f"{name}.weight".lstrip("."), module, weight)
        elif isinstance(module, Linear8bitLt) and not isinstance(module.state, Rows):
            _prepare_8bit(f"{name}.weight".lstrip("."), module, weight, getattr(root, "dtype", None))
        elif isinstance(module, ParametrizationList) and isinstance(module[0], Bnb4bitParametrization):
            module[0].quant_state = _blocks(f"{name}.original", module[0].quant_state)
        else:
            continue
        if kept_dtype(weight) is not None:  # prepared before
            continue
        keep_dtype(weight, weight.dtype)
        untyped(module)._save_to_state_dict = partial(nn.Module._save_to_state_dict, module)
        if getattr(module, "bias", None) is not None:
            module.register_forward_pre_hook(_cast_bias)
            module.register_forward_hook(_restore_bias, always_call=True)


def _blocks(name: str, state: Any) -> Blocks:
    if state is None:
        raise ValueError(f"{name} is not quantised yet: bitsandbytes does it when the model moves to its device")
    if getattr(state, "packing_format_for_cpu", False):
        raise ValueError(f"{name} was repacked for CPU inference, by a forward in eval(): shard the model first")
    return state if isinstance(state, Blocks) else Blocks(state)


def _prepare_4bit(name: str, layer: Any, weight: Params4bit) -> None:
    layer.quant_state = weight.quant_state = _blocks(name, weight.quant_state or getattr(layer, "quant_state", None))
    weight.module = None  # for quantising only
    if isinstance(layer, Linear4bit):
        layer.support_avx512bf16_for_cpu = False  # it would pack the weight once more, into other memory


def _prepare_8bit(name: str, layer: Linear8bitLt, weight: Int8Params, dtype: torch.dtype | None) -> None:
    if weight.dtype != torch.int8:
        raise ValueError(f"{name} is {weight.dtype} (has_fp16_weights, or not quantised yet): load the model in 8 bits")
    scales = layer.state.SCB if weight.SCB is None else weight.SCB
    assert scales is not None, f"{name} has no SCB"
    layer.state = Rows(layer.state, scales, dtype)
    layer.register_forward_pre_hook(_show_whole)
    weight.CB = weight.SCB = None


def _show_whole(layer: Any, _: Any) -> None:
    vars(layer.state)["whole"] = layer.weight


def _cast_bias(layer: Any, given: tuple[torch.Tensor, ...]) -> None:
    """bitsandbytes would write the bias, in the dtype that it computes in, into other memory."""
    bias, dtype = layer.bias, getattr(layer, "compute_dtype", None) or given[0].dtype
    if bias.dtype != dtype:
        layer._odc_bias, layer._parameters["bias"] = [bias], bias.to(dtype)


def _restore_bias(layer: Any, *_: Any) -> None:
    (layer._parameters["bias"],) = vars(layer).pop("_odc_bias", [layer._parameters["bias"]])


def packed_state(layer: nn.Module) -> Blocks | Rows | None:
    """What the packed weight of a prepared layer is computed with; None for other layers."""
    if isinstance(layer, Bnb4bitParametrization):
        return None  # the list around it has the weight
    within = layer[0] if isinstance(layer, ParametrizationList) else layer
    state = within._modules.get("quant_state", within._modules.get("state"))
    return state if isinstance(state, (Blocks, Rows)) else None


def packed_weight(layer: nn.Module) -> nn.Parameter:
    return untyped(layer).original if isinstance(layer, ParametrizationList) else untyped(layer).weight


def unpack(layer: nn.Module, read: Read) -> torch.Tensor:
    """The whole plain weight of a prepared layer. `read`: whole tensors of its parameters."""
    state, weight = packed_state(layer), read(packed_weight(layer))
    if isinstance(state, Blocks):
        return functional.dequantize_4bit(weight, state.plain(read))
    assert state is not None, "the layer is not packed"
    return functional.int8_vectorwise_dequant(weight, read(state.scales))
