"""A sharded model out into a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from .api import full_parameters


def save_pretrained(model: nn.Module, folder: str | Path, tokenizer: Any = None) -> None:
    """Writes config, safetensors and tokenizer of a sharded transformers model, for plain transformers to load.

    Any single rank may call it, outside of a minibatch. Weights are saved in the compute dtype. That rank holds the
    whole model in memory meanwhile.
    """
    from transformers import PreTrainedModel

    plain = next((kind for kind in type(model).__mro__[1:] if kind.__name__ == type(model).__name__[3:]), None)
    if not isinstance(model, PreTrainedModel) or plain is None:
        raise TypeError(f"{type(model).__name__} is not a sharded transformers model: save its state_dict() instead")
    weights = dict(full_parameters(model))
    with torch.device("meta"):
        empty = plain(model.config)
    empty.load_state_dict(weights, strict=False, assign=True)
    empty.tie_weights()
    missing = [name for name, value in empty.named_parameters() if value.is_meta]
    if missing:
        raise RuntimeError(f"no values for {missing[:3]}: they were not sharded (ignored_params)")
    empty.generation_config = model.generation_config
    empty.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
