"""Low-rank adapters by PEFT: the model's own weights are frozen and have no gradient shards."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from torch import nn

from odc_triton.api import full_parameters

_ADAPTER = "default"


def require_peft() -> Any:
    """The peft package. Raises ImportError with the remedy."""
    try:
        import peft
    except ImportError as error:
        raise ImportError('--lora-rank needs peft; run: pip install "odc-triton[peft]"') from error
    return peft


def add_adapters(model: nn.Module, *, rank: int, alpha: float | None, targets: str) -> None:
    """Puts adapters into a transformers model, in place, and freezes the rest.

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
        model.add_adapter(config, _ADAPTER)
    except ValueError as error:
        raise ValueError(f"--lora-targets {targets}: {error}") from error


def save_adapters(model: nn.Module, folder: str | Path) -> None:
    """Writes the adapters of a sharded model as a folder that plain PEFT loads. Rank 0 calls it, alone.

    In the compute dtype, as `full_parameters` gives them.
    """
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value for name, value in full_parameters(model) if f".{_ADAPTER}." in name}
    saved = get_peft_model_state_dict(model, state_dict=weights, adapter_name=_ADAPTER, save_embedding_layers=False)
    save_file(
        {f"base_model.model.{name}": value.contiguous().cpu() for name, value in saved.items()},
        folder / "adapter_model.safetensors",
        metadata={"format": "pt"},
    )
    config = copy.copy(model.peft_config[_ADAPTER])
    config.inference_mode = True
    config.save_pretrained(folder)
