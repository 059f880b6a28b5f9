"""PEFT's adapters: added to models that have no weights yet, and saved from sharded ones."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from .parameters import read_whole, sharded_parameters


def with_adapter(model: nn.Module, config: Any) -> nn.Module:
    """`peft.get_peft_model(model, config)`, also for a model on the meta device that will be sharded next.

    PEFT leaves the adapters of such a model on the meta device, and transformers' initialisation is unaware that one
    of each pair must start at 0. Here they get memory and PEFT's own initial values, drawn as on any model.

    Raises NotImplementedError for adapters other than pairs of A and B (DoRA, modules_to_save, trained embeddings).
    """
    from peft import get_peft_model
    from peft.tuners.lora import LoraConfig, LoraLayer

    if not isinstance(config, LoraConfig):
        raise NotImplementedError(f"{type(config).__name__} is not supported: give a peft.LoraConfig")
    if config.use_dora or config.modules_to_save or config.init_lora_weights is not True:
        raise NotImplementedError(
            "use_dora, modules_to_save and init_lora_weights need weights to start from: leave them out"
        )
    adapted = get_peft_model(model, config)
    for module in adapted.modules():
        if not isinstance(module, LoraLayer):
            continue
        for name in module.active_adapters:
            if len(module.lora_embedding_A):
                raise NotImplementedError("adapters of embeddings are not supported: leave them out of target_modules")
            pair = (module.lora_A[name], module.lora_B[name])
            if any(part.weight.is_meta for part in pair):
                for part in pair:
                    part.to_empty(device="cpu")
                module.reset_lora_parameters(name, init_lora_weights=True)
    return adapted


def write_adapter(model: nn.Module, folder: Path, dtype: torch.dtype | None) -> None:
    """Writes a sharded PEFT model's adapter into `folder`, as PEFT's `save_pretrained` would. Only rank 0 calls it.

    An adapter "ref", as TRL names a frozen reference, is not written.
    """
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    adapters = [name for name in model.peft_config if name != "ref"]
    if len(adapters) != 1:
        raise ValueError(f"the model has adapters {[*model.peft_config]}; exactly one besides 'ref' can be saved")
    (adapter,) = adapters
    parameters = sharded_parameters(model)
    weights = {
        name: read_whole(model, parameters.get(id(value), value), dtype)
        for name, value in model.named_parameters()
        if value.requires_grad or model.base_model.prefix in name
    }
    state = get_peft_model_state_dict(model, state_dict=weights, adapter_name=adapter, save_embedding_layers=False)
    tensors = {name: value.contiguous() for name, value in state.items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = model.peft_config[adapter]
    former, config.inference_mode = config.inference_mode, True  # as in PEFT
    try:
        config.save_pretrained(folder)
    finally:
        config.inference_mode = former
    shutil.copymode(folder / "adapter_config.json", folder / "adapter_model.safetensors")  # mode 0600 otherwise


class LoraPair(NamedTuple):
    """What LoRA adds to a weight: `scaling` * b @ a, or its transpose."""

    a: Any
    b: Any
    scaling: float
    is_transposed: bool


def adapted_weights(part: nn.Module) -> dict[str, list[LoraPair]]:
    """The pairs of sharded parameters of each weight that LoRA is added to, by the weight's name in the plain model.

    `part`: the transformers model within PEFT's wrapper. Raises NotImplementedError for adapters that can't be added.
    """
    from peft.tuners.lora import Linear, LoraLayer

    found: dict[str, list[tuple[Any, str]]] = {}
    for name, module in part.named_modules():
        if isinstance(module, LoraLayer):
            if not isinstance(module, Linear) or any([*module.use_dora.values(), *module.lora_bias.values()]):
                raise NotImplementedError(
                    f"{name}: only LoRA of linear layers, without bias and DoRA, can be added to the weights that "
                    f"another engine samples from, or that are exported: use another adapter, sample by "
                    f"transformers, or export the adapter alone"
                )
            found[f"{name}.weight"] = [
                LoraPair(
                    a=module.lora_A[adapter].weight,
                    b=module.lora_B[adapter].weight,
                    scaling=module.scaling[adapter],
                    is_transposed=module.fan_in_fan_out,
                )
                for adapter in module.active_adapters
                if adapter in module.lora_A
            ]
    return found


def merged(value: torch.Tensor, pairs: Iterable[LoraPair], read: Callable[[Any], torch.Tensor]) -> torch.Tensor:
    """A base's whole weight with its `adapted_weights` added, in its own dtype. `read`: whole values of a and b."""
    for pair in pairs:
        added = (read(pair.b).float() @ read(pair.a).float()) * pair.scaling
        value = (value + (added.T if pair.is_transposed else added)).to(value.dtype)
    return value
