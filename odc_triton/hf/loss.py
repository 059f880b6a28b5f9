"""A pack's loss, and what a model is called with for it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

IGNORED_LABEL = -100
_PACK_INPUTS = ("input_ids", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def model_inputs(pack: Mapping[str, Any]) -> dict[str, Any]:
    """What a training forward of `pack` is called with.

    Its ids and positions; its cumulative lengths, where it has them (`cu_seq_lens_q`, `max_length_q`, ... as
    transformers names them); and no cache, which would hold every layer's keys and values for nothing.
    """
    return {name: pack[name] for name in _PACK_INPUTS if name in pack} | {"use_cache": False}


def summed_loss(model: nn.Module, pack: Mapping[str, Any]) -> Tensor:
    """Cross-entropy summed over the pack's target tokens, a scalar in fp32; 0 where it has none.

    Token t is predicted from position t - 1; labels of -100 are no targets. Divide by the *global* number of
    targets before `backward()`. The head runs on the predicting positions only, where the model's forward
    takes `logits_to_keep` (transformers' causal LMs do): logits then cost memory by target, not by token.

    A pack of several documents needs `enable_packing(model)` first; a single document does not.

    Raises ValueError if `labels` is not [1, T].
    """
    labels = pack["labels"]
    if labels.ndim != 2 or labels.shape[0] != 1:
        raise ValueError(f"A pack is one row, [1, T], but labels are {list(labels.shape)}: loop over the rows.")
    positions = (labels[0, 1:] != IGNORED_LABEL).nonzero().flatten()  # those that predict a target
    inner = getattr(model, "module", model)  # DistributedDataParallel hides the signature and passes all along
    if hasattr(inner, "get_base_model"):  # as PEFT does
        inner = inner.get_base_model()
    if "logits_to_keep" in inspect.signature(inner.forward).parameters:
        logits = model(**model_inputs(pack), logits_to_keep=positions).logits
    else:
        logits = model(**model_inputs(pack)).logits[:, positions]
    return F.cross_entropy(logits[0].float(), labels[0, positions + 1], reduction="sum")
