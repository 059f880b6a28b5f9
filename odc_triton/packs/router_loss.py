"""Routers' auxiliary losses of mixtures of experts, of each sample of a pack.

transformers adds one to the loss that a forward with labels returns: the sum over experts of an expert's part of the
tokens times its mean probability. Such a product of two means over the tokens of a forward depends on which samples
share a pack. So here it is computed of each sample alone, and weighted is the mean over the samples of all ranks: what
transformers computes for microbatches of one sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .enable import innermost


def router_weight(model: nn.Module) -> float:
    """What the routers' auxiliary losses count in the loss, by the model's config; 0.0 if they don't."""
    config: Any = getattr(innermost(model), "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    counts = getattr(config, "output_router_logits", False)
    return float(getattr(config, "router_aux_loss_coef", None) or 0.0) if counts else 0.0


def router_losses(model: nn.Module, layers: Sequence[Tensor], pack: Mapping[str, Any]) -> Tensor:
    """The auxiliary losses of the pack's D documents, [D] in fp32. `layers`: the routers' logits, [T, E] each.

    Raises ValueError for a model without routers' logits, for reentrant checkpointing, and for segments of samples.
    """
    name, tokens = type(innermost(model)).__name__, pack["input_ids"].numel()
    if any(each.shape[:-1] != (tokens,) for each in layers) or not layers:
        raise ValueError(f"{name} does not return its routers' logits by token: set router_aux_loss_coef to 0")
    if torch.is_grad_enabled() and not any(each.requires_grad for each in layers):
        raise ValueError(f"{name}'s routers' logits have no gradient: checkpoint with use_reentrant=False")
    if "segments" in pack or "cu_seq_lens_q" not in pack:
        what = "segments of samples" if "segments" in pack else "no cu_seq_lens_q"
        raise ValueError(
            f"a router's auxiliary loss has means over a sample's tokens, and this pack has {what}: give packs of "
            f"unsplit samples, of pack_collate"
        )
    lengths = pack["cu_seq_lens_q"].diff()
    document = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths, output_size=tokens)
    top_k, experts = innermost(model).config.get_text_config().num_experts_per_tok, layers[0].shape[-1]
    chosen, probability = layers[0].new_zeros(2, len(lengths), experts, dtype=torch.float32)
    for each in layers:
        weights = each.softmax(-1)
        best = weights.topk(top_k).indices
        chosen = chosen.index_add(0, document, torch.zeros_like(weights.float()).scatter(1, best, 1.0))
        probability = probability.index_add(0, document, weights.float())
    rows = (len(layers) * lengths.float())[:, None]
    return experts * (chosen / rows * (probability / rows)).sum(1)
