"""Models on the meta device with bitsandbytes' quantised layers: `load_pretrained_shards` packs their weights."""

from __future__ import annotations

from typing import Any

import torch
from bitsandbytes import functional
from bitsandbytes.nn import Linear4bit, Linear8bitLt, parametrize

from ..base.untyped import untyped
from ..nn.experts import are_experts, is_of_the_interface
from ..nn.packed import packed_state, prepare

METHODS = {"nf4": 4, "int8": 8}  # bits
_OF_EXPERTS = "nf4 packs experts that transformers runs by its ExpertsInterface, and there is no other way"


def quantise_on_meta(model: Any, method: str, dtype: torch.dtype) -> None:
    """Replaces the linear layers of a transformers model on the meta device that `from_pretrained` would quantise, and
    packs experts, which it would not, by bitsandbytes' parametrization. `load_pretrained_shards` fills them.

    method: "nf4", with nested scales, or "int8".
    dtype: of compute, and of the weights before they are packed.

    Raises ValueError for another method, and a model without such layers.
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
    functional.name2qmap.setdefault("dynamic", functional.create_dynamic_map())  # it would keep one on the meta device
    kept = [f".{name}." for name in model._keep_in_fp32_modules_strict or ()]
    for name, value in model.named_parameters():  # as `from_pretrained` of this dtype
        if not any(each in f".{name}" for each in kept):
            value.data = value.data.to(dtype)
    for name, layer in list(model.named_modules()):
        if are_experts(layer):
            if bits != 4 or not is_of_the_interface(layer):
                raise ValueError(f"{name} ({type(layer).__name__}) can't be packed by {method}: {_OF_EXPERTS}")
            for key in [key for key, value in layer._parameters.items() if value is not None and value.ndim == 3]:
                parametrize.replace_parameter_4bit(layer, key, compress_statistics=True, quant_type="nf4")
        elif isinstance(layer, (Linear4bit, Linear8bitLt)):
            untyped(layer.weight)._quantize("meta")
    prepare(model)
    if not any(packed_state(layer) for layer in model.modules()):
        raise ValueError(f"{type(model).__name__} has no linear layers to quantise")
    setattr(model, f"is_loaded_in_{bits}bit", True)  # which PEFT asks
