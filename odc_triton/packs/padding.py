"""Whether padding before a prompt changes what follows it."""

from __future__ import annotations

from torch import nn

_AFTER = ("out_proj", "o_proj", "dt_proj")  # not in the convolution's input


def padding_leaks(model: nn.Module) -> bool:
    """True if a convolution reads a projection with a bias.

    Transformers sets the projection's input to zero at padding, so the convolution of the first tokens, and what a
    cache keeps of a prompt shorter than its kernel, has the bias there; alone, a prompt has zeros before it.
    """
    return any(
        name.endswith(".bias") and "proj" in name and not name.startswith(_AFTER)
        for module in model.modules()
        if any(isinstance(child, nn.Conv1d) for child in module.children())
        for name, _ in module.named_parameters()
    )
