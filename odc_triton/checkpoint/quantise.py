"""Models on the meta device with bitsandbytes' quantised layers: `load_pretrained_shards` packs their weights."""

from __future__ import annotations

from typing import Any

import torch
from bitsandbytes import functional
from bitsandbytes.nn import Int8Params, Linear4bit, Linear8bitLt, Params4bit, parametrize
from torch import nn
from torch.nn.utils.parametrize import register_parametrization

from ..base.untyped import untyped
from ..nn.experts import are_experts, is_of_the_interface
from ..nn.operand import kept_dtype
from ..nn.packed import packed_state, prepare

METHODS = {"nf4": 4, "int8": 8}  # bits
_OF_EXPERTS = "nf4 packs experts that transformers runs by its ExpertsInterface, and there is no other way"


def quantise_on_meta(model: Any, method: str, dtype: torch.dtype) -> None:
    """Replaces the linear layers of a transformers model on the meta device that `from_pretrained` would quantise, and
    packs experts, which it would not, by bitsandbytes' parametrization.

    `method`: "nf4", with nested scales, or "int8"; `dtype`: of compute, and of the weights before they are packed.
    `load_pretrained_shards` fills them. Raises ValueError for another method, and a model without such layers.
    """
    from transformers import BitsAndBytesConfig
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear
    from transformers.quantizers.base import HfQuantizer

    if method not in METHODS:
        raise ValueError(f"quantize is {method!r}; give one of {', '.join(METHODS)}")
    bits = METHODS[method]
    options = {"bnb_4bit_quant_type": method, "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": dtype}
    config = BitsAndBytesConfig(**{f"load_in_{bits}bit": True}, **(options if bits == 4 else {}))
    skipped = HfQuantizer.get_modules_to_not_convert(model, None, model._keep_in_fp32_modules)
    replace_with_bnb_linear(model, skipped, config)
    with torch.device("meta"):
        for name, layer in list(model.named_modules()):
            if are_experts(layer):
                if bits != 4 or not is_of_the_interface(layer):
                    raise ValueError(f"{name} ({type(layer).__name__}) can't be packed by {method}: {_OF_EXPERTS}")
                for key in [key for key, value in layer._parameters.items() if value is not None and value.ndim == 3]:
                    _parametrize(layer, key, _empty_4bit(layer._parameters[key], dtype, method))
            elif isinstance(layer, Linear4bit):
                layer.weight = _empty_4bit(layer.weight, dtype, method)
            elif isinstance(layer, Linear8bitLt):
                layer.weight = untyped(Int8Params)(
                    layer.weight.data.to(torch.int8), False, SCB=torch.empty(len(layer.weight))
                )
    prepare(model)
    for value in model.parameters():  # as `from_pretrained` of this dtype
        if kept_dtype(value) is None:
            value.data = value.data.to(dtype)
    for layer in model.modules():
        if isinstance(layer, Linear8bitLt):
            untyped(layer).state.dtype = dtype
    if not any(packed_state(layer) for layer in model.modules()):
        raise ValueError(f"{type(model).__name__} has no linear layers to quantise")
    setattr(model, f"is_loaded_in_{bits}bit", True)  # which PEFT asks


def _empty_4bit(weight: Any, dtype: torch.dtype, kind: str, blocksize: int = 64) -> Any:
    blocks = -(-weight.numel() // blocksize)
    nested = functional.QuantState(torch.empty(-(-blocks // 256)), code=torch.empty(256), blocksize=256)
    nested.dtype = torch.float32
    absmax = torch.empty(blocks, dtype=torch.uint8)
    state = functional.QuantState(absmax, weight.shape, torch.empty(16), blocksize, kind, dtype)
    state.offset, state.state2, state.nested = torch.empty(()), nested, True
    codes = torch.empty(-(-weight.numel() // 2), 1, dtype=torch.uint8)
    return untyped(Params4bit)(codes, quant_state=state, quant_type=kind, bnb_quantized=True)


def _parametrize(module: nn.Module, name: str, weight: Params4bit) -> None:
    """As bitsandbytes' `replace_parameter_4bit`, without its state dict."""
    module._parameters[name] = nn.Parameter(weight.data, requires_grad=False)
    register_parametrization(module, name, parametrize.Bnb4bitParametrization(untyped(weight).quant_state), unsafe=True)
    module.register_forward_pre_hook(parametrize._enable_parametrization_cache)
    module.register_forward_hook(parametrize._disable_parametrization_cache, always_call=True)
