"""A sharded model out into a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..api import full_parameters
from ..module import is_sharded, plain_class


def save_pretrained(model: nn.Module, folder: str | Path, tokenizer: Any = None) -> None:
    """Writes config, safetensors and tokenizer of a sharded transformers model, for plain transformers to load.

    Rank 0 calls it, alone, outside of a minibatch: transformers writes nothing on other ranks. Weights are saved in the
    compute dtype. Rank 0 holds the whole model in memory meanwhile.

    Raises TypeError for another kind of model, RuntimeError on other ranks and for parameters that have no values here.
    """
    if dist.is_initialized() and dist.get_rank() != 0:
        raise RuntimeError(
            f"save_pretrained on rank {dist.get_rank()}: transformers saves on rank 0 only, call it there"
        )
    from transformers import PreTrainedModel

    if not (isinstance(model, PreTrainedModel) and is_sharded(model)):
        raise TypeError(f"{type(model).__name__} is not a sharded transformers model: save its state_dict() instead")
    weights = dict(full_parameters(model))
    persistent = model.state_dict().keys()
    weights |= {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    with torch.device("meta"):
        empty = plain_class(model)(model.config)
    empty.load_state_dict(weights, strict=False, assign=True)
    empty.tie_weights()
    missing = [name for name, value in empty.state_dict().items() if value.is_meta]
    if missing:
        raise RuntimeError(f"no values for {missing[:3]}: they were not sharded (ignored_params)")
    empty.generation_config = model.generation_config
    empty.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def load_causal_lm(*, model: str | None, init: str | None) -> nn.Module:
    """A causal LM of transformers in fp32: weights from a folder or hub id, or random ones for the config `init`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if init is not None:
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(init), dtype=torch.float32)
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
