"""A small model of the same class and config with random weights: what is proved of it holds for the large one."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch import nn

_HEAD_WIDTHS = ("num_attention_heads", "num_key_value_heads", "hidden_size", "intermediate_size")
_VOCABULARY = 64


def stand_in(model: nn.Module, device: torch.device | str = "cpu") -> nn.Module:
    """Makes one for a transformers model whose weights are not there yet, in eval mode. The random state is kept.

    It has each kind of layer of `config.layer_types` (at least two layers), a vocabulary of 64, and where the config
    has plain heads few of them, as wide as the model's and grouped alike; where such a model can't be made, the
    layers' full width. Raises what the model's class raises where neither can be made.
    """
    error: Exception | None = None
    for narrow in (True, False):
        config = copy.deepcopy(model.config)
        for part in {id(each): each for each in (config, config.get_text_config())}.values():
            _shorten(part)
            if narrow:
                _narrow(part)
        try:
            with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of sizes that nobody chose
                made = type(model)(config).float().eval()
                made(input_ids=torch.arange(4)[None], use_cache=False)
            return made.to(device)
        except Exception as raised:  # a class may refuse odd sizes by anything
            error = raised
    raise error


def _shorten(config: Any) -> None:
    layers = getattr(config, "num_hidden_layers", None)
    if not isinstance(layers, int):
        return
    kinds = getattr(config, "layer_types", None)
    few = min(layers, 2)
    if isinstance(kinds, list):
        few = max(few, *(kinds.index(kind) + 1 for kind in set(kinds)))
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == layers:
            setattr(config, name, value[:few])
    config.num_hidden_layers = few
    config.vocab_size = min(config.vocab_size, _VOCABULARY)
    for token in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(config, token, None)


def _narrow(config: Any) -> None:
    heads, groups, width, inner = (getattr(config, name, None) for name in _HEAD_WIDTHS)
    if not all(isinstance(each, int) for each in (heads, groups, width, inner)) or heads % groups or width % heads:
        return
    few = max(1, 2 // (heads // groups))  # heads of keys and values; two heads of queries or more
    config.num_key_value_heads = few = min(few, groups)
    config.num_attention_heads = few * (heads // groups)
    config.hidden_size = config.num_attention_heads * (width // heads)
    config.intermediate_size = min(inner, 64)
    if isinstance(getattr(config, "moe_intermediate_size", None), int):
        config.moe_intermediate_size = min(config.moe_intermediate_size, 32)
