"""Rotary frequencies of each document of a pack, for rope that has others beyond a model's original length.

transformers chooses them ("dynamic", "longrope") by the largest position of a whole batch, and "dynamic" keeps those of
the longest batch so far. Here each document gets those that it has alone in a model that has seen no other; a segment
gets those of its sample. Padded batches and steps of generation keep transformers' choice.
"""

from __future__ import annotations

import inspect
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..plan.entries import bounds_on_host


def follow_documents(model: nn.Module) -> bool:
    """Hooks the rotary embeddings that need it, which `tell_by_positions` tells of documents; False if none does."""
    chosen = [each for each in model.modules() if _kinds(each)]
    for each in chosen:
        if _of_documents not in each._forward_hooks.values():
            each.register_forward_hook(_of_documents, with_kwargs=True)
    return bool(chosen)


def _kinds(module: nn.Module) -> list[str]:
    """The types of a rotary embedding of transformers that depend on the length; it may have one by kind of layer."""
    kinds = getattr(module, "rope_type", None)
    kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
    return [kind for kind in kinds if isinstance(kind, str) and ("dynamic" in kind or kind == "longrope")]


@torch._disable_dynamo  # the documents differ in every forward
def _of_documents(module: nn.Module, args: tuple, given: dict[str, Any], output: Any) -> Any:
    """A hook of the rotary embedding's forward, whose `output` is replaced."""
    bound = inspect.signature(module.forward).bind(*args, **given).arguments
    positions, batch = bound["position_ids"], len(bound["x"])
    told = getattr(positions, "_odc_pack", {} if batch == 1 else None)
    if told is None or positions.ndim != 2 or positions.shape[1] == 1:
        return None  # a padded batch; positions of several axes, which enable_packing refuses; a step of generation
    if batch == 1 and "cu_seq_lens_q" in told:
        bounds = bounds_on_host(told["cu_seq_lens_q"], positions.numel())
    else:
        starts = F.pad(positions.diff(dim=1) != 1, (1, 0), value=True).flatten().nonzero().flatten()
        bounds = [*starts.tolist(), positions.numel()]
    segments, found = told.get("segments") or [None] * (len(bounds) - 1), []
    for (start, end), segment in zip(pairwise(bounds), segments, strict=True):
        part = positions.reshape(1, -1)[:, start:end]
        if segment is not None:
            part = F.pad(part, (0, 1), value=segment.length - 1)
        if any("dynamic" in kind for kind in _kinds(module)):  # forgets longer ones at a short batch
            module.forward(**bound | {"position_ids": part.new_zeros(1, 1)})
            if hasattr(module, "original_inv_freq"):  # before transformers 5.13 it does not
                module.inv_freq = module.original_inv_freq
        made = module.forward(**bound | {"position_ids": part})
        found.append([each[:, : end - start] for each in ([made] if isinstance(made, Tensor) else made)])
    joined = [torch.cat(parts, dim=1)[0].unflatten(0, positions.shape) for parts in zip(*found, strict=True)]
    return joined[0] if isinstance(output, Tensor) else tuple(joined)
