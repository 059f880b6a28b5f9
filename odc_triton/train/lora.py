"""Low-rank adapters by PEFT: the model's own weights are frozen and have no gradient shards."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from torch import nn

from odc_triton.api import engine_of
from odc_triton.checkpoint.aside import folder_aside

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


def save_adapters(model: nn.Module, folder: str | Path, tokenizer: Any) -> None:
    """Writes the adapters of a sharded model as a folder that plain PEFT loads. Rank 0 calls it, alone.

    In the compute dtype, as `full_parameters` gives them.
    """
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    parameters = {id(parameter.sharded): parameter for parameter in engine_of(model).parameters}
    wanted = [parameters[id(p)] for name, p in model.named_parameters() if f".{_ADAPTER}." in name]
    weights = dict(engine_of(model).full_parameters(wanted))
    saved = get_peft_model_state_dict(model, state_dict=weights, adapter_name=_ADAPTER, save_embedding_layers=False)
    config = copy.copy(model.peft_config[_ADAPTER])
    config.inference_mode = True
    with folder_aside(folder, overwrite=True) as aside:
        save_file(
            {f"base_model.model.{name}": value.contiguous().cpu() for name, value in saved.items()},
            aside / "adapter_model.safetensors",
            metadata={"format": "pt"},
        )
        config.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
