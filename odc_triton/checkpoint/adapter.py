"""PEFT's adapters: added to models that have no weights yet, and saved from sharded ones."""

from __future__ import annotations

import copy
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ..base.untyped import untyped
from ..engine.module import below_wrappers
from .adapted import base_of
from .parameters import is_packed, is_transposed, read_whole, sharded_parameters

STARTS_AS_BASE = "_odc_starts_as_base"  # in PEFT's wrapper of what is trained whole: it gets the values of the files


def with_adapter(model: nn.Module, config: Any) -> nn.Module:
    """`peft.get_peft_model(model, config)`, also for a model on the meta device that will be sharded next.

    PEFT leaves the adapters of such a model on the meta device, and transformers' initialisation is unaware that one of
    each pair must start at 0. Here they get memory and PEFT's own initial values, drawn as on any model.

    config: PEFT's, such as a LoraConfig.

    Raises NotImplementedError for adapters other than pairs of A and B (DoRA, modules_to_save, trained embeddings).
    """
    from peft import get_peft_model
    from peft.tuners.lora import LoraConfig, LoraLayer
    from peft.utils.other import ModulesToSaveWrapper

    if not isinstance(config, LoraConfig):
        raise NotImplementedError(f"{type(config).__name__} is not supported: give a peft.LoraConfig")
    needs = config.use_dora or config.modules_to_save or config.trainable_token_indices
    if needs or config.init_lora_weights is not True:
        raise NotImplementedError(
            "use_dora, modules_to_save, trainable_token_indices and init_lora_weights need weights to start from: "
            "leave them out"
        )
    source = getattr(getattr(model, "config", None), "_name_or_path", "")
    if source and Path(source).is_dir() and base_of(source) is not None:
        raise NotImplementedError(
            f"{source} has an adapter, and PEFT can't read one on top of it: begin with a model that PEFT's "
            f"merge_and_unload() made of it"
        )
    adapted = get_peft_model(model, config)
    for module in adapted.modules():
        if isinstance(module, ModulesToSaveWrapper) and any(each.is_meta for each in module.parameters()):
            vars(module)[STARTS_AS_BASE] = True  # PEFT has copied a classifier's score, which has no values yet
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


def adapter_reads(model: nn.Module) -> set[int]:
    """The ids of the trained tensors that are in what is written of a PEFT model's adapter. Reads no values."""
    own = _adapters_own(model)
    if not any(value.requires_grad for value in own.values()):
        return set()
    # PEFT renames and slices, so autograd says what reaches its files; the tensors have no memory.
    with torch.enable_grad():
        of = {id(each): torch.zeros((), dtype=each.dtype, requires_grad=each.requires_grad) for each in own.values()}
        state = _peft_state(model, {name: of[id(value)].expand(value.shape) for name, value in own.items()})
        sums = [value.sum() for value in state.values() if value.requires_grad]
        total = sum(sums, start=torch.zeros((), requires_grad=True))
        trained = {key: each for key, each in of.items() if each.requires_grad}
        gradients = torch.autograd.grad(total, [*trained.values()], allow_unused=True)
    return {key for key, gradient in zip(trained, gradients, strict=True) if gradient is not None}


def write_adapter(model: nn.Module, folder: Path, dtype: torch.dtype | None) -> None:
    """Writes a sharded PEFT model's adapter into `folder`, as PEFT's `save_pretrained` would. Not collective.

    If there are several adapters it writes the one that is trained.
    """
    from safetensors.torch import save_file

    parameters, own = sharded_parameters(model), _adapters_own(model).items()
    whole = {name: read_whole(model, parameters.get(id(value), value), dtype) for name, value in own}
    prefix = "" if hasattr(model, "get_base_model") else "base_model.model."  # added by transformers' add_adapter
    state = {below_wrappers(name): value.contiguous() for name, value in _peft_state(model, whole).items()}
    tensors = {f"{prefix}{name}": value for name, value in state.items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = untyped(model).peft_config[_adapter(model)]
    former, config.inference_mode = config.inference_mode, True  # as in PEFT
    try:
        config.save_pretrained(folder)
    finally:
        config.inference_mode = former
    shutil.copymode(folder / "adapter_config.json", folder / "adapter_model.safetensors")  # mode 0600 otherwise


def _adapter(model: Any) -> str:
    trained = {part for name, each in model.named_parameters() if each.requires_grad for part in name.split(".")}
    active = model.active_adapters
    for names in (model.peft_config, trained, active() if callable(active) else active):
        if len(found := [name for name in model.peft_config if name in names]) == 1:
            return found[0]
    raise ValueError(f"the model has adapters {[*model.peft_config]}, and one can be saved: train or activate only one")


def _peft_state(model: nn.Module, whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    from peft import get_peft_model_state_dict

    adapter, is_resized = _adapter(model), _is_resized(model)
    return get_peft_model_state_dict(model, state_dict=whole, adapter_name=adapter, save_embedding_layers=is_resized)


def _is_resized(model: Any) -> bool:
    """True if the base's files, as far as they are here, have another vocabulary: PEFT writes the embeddings too."""
    source = model.peft_config[_adapter(model)].base_model_name_or_path
    try:
        config = type(model.config).from_pretrained(source, local_files_only=True) if source else model.config
    except (OSError, ValueError):
        return False
    return config.get_text_config().vocab_size != model.config.get_text_config().vocab_size


def _adapters_own(model: Any) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers but for the base's frozen ones, a tied one by each of its names."""
    base = frozen_ids(model)
    if _is_resized(model):
        layers = (model.get_input_embeddings(), model.get_output_embeddings())
        base -= {id(each) for layer in layers if layer is not None for each in layer.parameters()}
    modules = model.named_modules(remove_duplicate=False)
    own = {f"{prefix}.{name}": value for prefix, each in modules for name, value in _tensors_of(each).items()}
    return {name.removeprefix("."): value for name, value in own.items() if id(value) not in base}


def lora_factors(model: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """(PEFT's config, LoRA's factors by their names in PEFT's files) if with the frozen base they are the whole policy;
    empty for models without adapters. Raises NotImplementedError, ValueError for others. Reads no values."""
    if not getattr(model, "peft_config", None):
        return {}, {}
    adapter, state = _adapter(model), _peft_state(model, _adapters_own(model))
    factors = {
        name: each for name, each in state.items() if re.search(r"\.lora_[AB]\.weight$", name) and each.dim() == 2
    }
    known = {id(each) for each in factors.values()}
    others = {name: each for name, each in model.named_parameters() if each.requires_grad and id(each) not in known}
    for name in state.keys() - factors.keys() or others:
        raise NotImplementedError(f"{name} is not one of LoRA's two factors of a linear layer")
    config = model.peft_config[adapter]
    for name, layer in model.named_modules():
        if isinstance(layer, peft_layers()) and adapter in getattr(layer, "scaling", {}):
            scaling = layer.lora_alpha[adapter] / layer.r[adapter] ** (0.5 if config.use_rslora else 1)
            if layer.active_adapters != [adapter] or layer.disable_adapters or layer.scaling[adapter] != scaling:
                raise NotImplementedError(f"{name} has another active adapter, or is disabled or scaled by hand")
            if not _adds_pairs(layer, untyped(layer).base_layer):
                raise NotImplementedError(f"{name} is merged, or a variant of LoRA, or no linear layer")
    prefix = "" if hasattr(model, "get_base_model") else "base_model.model."
    return config.to_dict(), {prefix + below_wrappers(name): each for name, each in factors.items()}


def frozen_ids(model: nn.Module) -> set[int]:
    """The ids of what is not trained of the model below PEFT's adapters."""
    base = untyped(model).get_base_model() if hasattr(model, "get_base_model") else model
    frozen = [each for _, each in origins_of(base, adapted=False) if not each.value.requires_grad]
    return {id(each.value) for each in frozen}.union(*(each.reads() for each in frozen if each.packed is not None))


class LoraPair(NamedTuple):
    """What LoRA adds to a weight: `scaling` * b @ a, or its transpose."""

    a: Any
    b: Any
    scaling: float
    is_transposed: bool


class Origin(NamedTuple):
    """What a tensor of the plain model is made of: `value` with `pairs` added, or what PEFT merges in `layer`, where it
    is called `name`. `packed`: the layer of which `value` is the quantised weight."""

    value: torch.Tensor
    pairs: tuple[LoraPair, ...] = ()
    layer: nn.Module | None = None
    name: str = ""
    packed: nn.Module | None = None

    def below(self, read: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        """The whole tensor without `pairs`. `read`: whole values of parameters."""
        if self.packed is None:
            return read(self.value)
        from ..nn.packed import unpack

        whole = unpack(self.packed, read)
        return whole.T.contiguous() if is_transposed(self.packed) else whole

    def key(self) -> tuple[Any, ...]:
        """Equal for tensors that are always equal, as tied ones are."""
        return type(self.layer), self.reads(), [pair[2:] for pair in self.pairs]

    def reads(self) -> set[int]:
        """The ids of all tensors that it is made of."""
        of_layers = [each for layer in (self.layer, self.packed) if layer is not None for each in layer.parameters()]
        return {id(each) for each in [self.value, *of_layers, *(each for pair in self.pairs for each in pair[:2])]}


def origins_of(module: nn.Module, prefix: str = "", *, adapted: bool = True) -> Iterator[tuple[str, Origin]]:
    """Each parameter and persistent buffer of the plain model in `module`, by its name there, a tied one by each.

    `adapted`: as PEFT's active adapters make it; else as it is below them.
    """
    if isinstance(module, peft_layers()):
        yield from _origins_of_layer(module, prefix, adapted=adapted)
        return
    packed = module if is_packed(module) else None
    for name, value in _tensors_of(module).items():
        yield f"{prefix}{name}", Origin(value, packed=packed if name == "weight" else None)
    if packed is not None:
        return
    for name, child in module._modules.items():
        if name == "parametrizations" and isinstance(child, nn.ModuleDict) and all(map(is_packed, child.values())):
            yield from ((f"{prefix}{key}", Origin(untyped(each).original, packed=each)) for key, each in child.items())
        elif child is not None:
            yield from origins_of(child, prefix + below_wrappers(f"{name}."), adapted=adapted)


def _tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and persistent buffers of this module alone."""
    buffers = {name: each for name, each in module._buffers.items() if name not in module._non_persistent_buffers_set}
    return {name: each for name, each in (module._parameters | buffers).items() if each is not None}


def peft_layers() -> tuple[type, ...]:
    """PEFT's classes of layers that stand in the place of others."""
    if "peft" not in sys.modules:
        return ()
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    return BaseTunerLayer, AuxiliaryTrainingWrapper


def _origins_of_layer(layer: Any, prefix: str, *, adapted: bool) -> Iterator[tuple[str, Origin]]:
    from peft.tuners.ln_tuning.layer import LNTuningLayer
    from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

    base = layer.original_module if isinstance(layer, AuxiliaryTrainingWrapper) else layer.base_layer
    if not adapted:
        yield from origins_of(base, prefix, adapted=False)
    elif isinstance(layer, (ModulesToSaveWrapper, LNTuningLayer)):
        others = layer.modules_to_save if isinstance(layer, ModulesToSaveWrapper) else layer.ln_tuning_layers
        active = [others[name] for name in layer.active_adapters if name in others]
        yield from origins_of(active[0] if active else base, prefix)
    elif _adds_pairs(layer, base):
        of = untyped(layer)
        active = [name for name in of.active_adapters if name in of.lora_A]
        ab = [(of.lora_A[name].weight, of.lora_B[name].weight, of.scaling[name]) for name in active]
        pairs = [LoraPair(*each, of.fan_in_fan_out or is_transposed(base)) for each in ab]
        for name, origin in origins_of(base, prefix):
            is_weight = name == f"{prefix}weight"
            yield name, origin._replace(pairs=(*origin.pairs, *pairs)) if is_weight else origin
    else:
        for name, origin in origins_of(base, adapted=False):
            yield f"{prefix}{name}", Origin(origin.value, layer=layer, name=name)


def _adds_pairs(layer: Any, base: nn.Module) -> bool:
    from peft.tuners import lora

    is_lora = isinstance(layer, lora.Linear) or (isinstance(layer, lora.LoraLayer) and is_packed(base))
    return is_lora and not any([*layer.lora_variant, *layer.lora_bias.values(), layer.merged_adapters])


def merged(value: torch.Tensor, pairs: Iterable[LoraPair], read: Callable[[Any], torch.Tensor]) -> torch.Tensor:
    """A base's whole weight with LoRA's `pairs` added, in its own dtype. `read`: whole values of a and b."""
    for pair in pairs:
        added = (read(pair.b).float() @ read(pair.a).float()) * pair.scaling
        value = (value + (added.T if pair.is_transposed else added)).to(value.dtype)
    return value


@torch.no_grad()
def merged_layer(layer: Any, read: Callable[[Any], torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of the plain layer that PEFT's `layer` becomes if PEFT merges it, by their names in it.

    `read`: whole values of its parameters. Raises NotImplementedError for a layer that can't be merged.
    """
    others = {id(each): nn.Parameter(read(each), requires_grad=False) for each in layer.parameters()}
    hooks = [each for module in layer.modules() for name, each in vars(module).items() if name.endswith("_hooks")]
    others |= {id(each): type(each)() for each in hooks}  # which may hold anything
    try:
        plain = copy.deepcopy(layer, others)  # with these in the place of its own
        if hasattr(plain, "unload_and_optionally_merge_module"):
            plain = plain.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
        else:
            plain.merge()
            plain = plain.get_base_layer()
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise NotImplementedError(f"PEFT can't merge it ({error})") from error
    found = plain.state_dict()
    if extra := found.keys() - {name for name, _ in origins_of(layer, adapted=False)}:
        raise NotImplementedError(f"it becomes a layer with {sorted(extra)}, which the plain model does not have")
    return found
