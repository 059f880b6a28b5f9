"""Low-rank adapters by PEFT: the model's own weights are frozen and have no gradient shards."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..checkpoint import with_adapter


def require_peft() -> Any:
    """The peft package. Raises ImportError with the remedy."""
    try:
        import peft
    except ImportError as error:
        raise ImportError('--lora-rank needs peft; run: pip install "odc-triton[peft]"') from error
    return peft


def add_adapters(model: nn.Module, *, rank: int, alpha: float | None, targets: str) -> nn.Module:
    """The transformers model below PEFT's wrapping, with adapters; the rest is frozen.

    `targets`: "all-linear", or names of layers with commas between. Raises ImportError without peft, ValueError for
    names that no layer has.
    """
    peft = require_peft()
    names = [name.strip() for name in targets.split(",") if name.strip()]
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=2 * rank if alpha is None else alpha,
        target_modules="all-linear" if names == ["all-linear"] else names,
        task_type="CAUSAL_LM",
    )
    try:
        return with_adapter(model, config)
    except ValueError as error:
        raise ValueError(f"--lora-targets {targets}: {error}") from error
