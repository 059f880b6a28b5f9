"""Model and optimizer in checkpoints: by name, for any number of ranks, FSDP2's or ours.

Names are those of torch's `get_model_state_dict` and `get_optimizer_state_dict`: `model.<name>`,
`optimizer.state.<name>.exp_avg`, `optimizer.param_groups.…`, below any prefix (`app.model.…`, `optim.state.…`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..base.errors import CheckpointDiffers
from ..base.untyped import untyped
from ..engine.module import below_wrappers
from ..optim import adamw8bit
from .dcp import tensors_of
from .failures import listed


def to_save(model: nn.Module, optimizer: Optimizer, *, without: Collection[str] = ()) -> dict[str, Any]:
    """The nested state dict to write, `without` these parameters of the model.

    An optimizer that has never stepped only has hyperparameters.
    """
    if optimizer.state:
        of_model, of_optimizer = get_state_dict(model, optimizer)
        return {"model": _left(of_model, without), "optimizer": of_optimizer}
    # torch's function for optimizers would create states by a step with a learning rate of 0, which would be counted.
    names = {id(parameter): below_wrappers(name) for name, parameter in model.named_parameters()}
    groups = [group | {"params": [names[id(p)] for p in group["params"]]} for group in optimizer.param_groups]
    optimizer_state = {"state": {}, "param_groups": groups}
    return {"model": _left(get_model_state_dict(model), without), "optimizer": optimizer_state}


def _left(state: dict[str, Any], without: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name not in without}


def to_load(
    model: nn.Module, optimizer: Optimizer | None, metadata: Metadata, *, without: Collection[str] = ()
) -> dict[str, Any]:
    """A flat state dict to read into, by the checkpoint's names: this rank's own tensors, and placeholders.

    `without`: parameters of the model that the checkpoint was written without.

    An optimizer without states gets states of zeros. Raises CheckpointDiffers before anything is overwritten.
    """
    here = _left(get_model_state_dict(model), without)
    there = tensors_of(metadata)
    prefix = _prefix(next(iter(here)), there)
    wanted = {(key := f"{prefix}{name}"): _as_saved(there.get(key), value) for name, value in here.items()}
    differences = [
        f"{name[len(prefix) :]} {what}"
        for name, value in wanted.items()
        if isinstance(value, torch.Tensor) and (what := _difference(there.get(name), value))
    ]
    if prefix:
        differences += [
            f"{name[len(prefix) :]} is not in this {type(model).__name__}"
            for name in there
            if name.startswith(prefix) and name not in wanted
        ]
    _raise_if(differences, f"the checkpoint is of another model than this {type(model).__name__}")
    if optimizer is not None:
        wanted |= _optimizer_to_load(model, optimizer, metadata, there)
    return wanted


def _as_saved(saved: TensorStorageMetadata | None, value: Any) -> Any:
    """For a scalar that was saved whole its owner's element as 0-d, a placeholder on other ranks. Else `value`."""
    if saved is None or saved.size != () or not isinstance(value, DTensor) or value.shape != (1,):
        return value
    local = value.to_local()
    return local.view(()) if local.numel() else torch.empty((), dtype=value.dtype, device=value.device)


def _difference(saved: TensorStorageMetadata | None, value: torch.Tensor) -> str | None:
    """The reason why a tensor can't be read into `value`, or None. A narrower dtype can be read into a wider one."""
    if saved is None:
        return "is not in the checkpoint"
    if saved.size != value.shape:
        return f"is {list(saved.size)} in the checkpoint and {list(value.shape)} here"
    if torch.promote_types(saved.properties.dtype, value.dtype) != value.dtype:
        return f"is {saved.properties.dtype} in the checkpoint and {value.dtype} here, which would round it"
    return None


def _raise_if(differences: list[str], words: str) -> None:
    if differences:
        raise CheckpointDiffers(f"{words}: {listed(differences)}. Nothing was overwritten.")


def _prefix(name: str, there: dict[str, TensorStorageMetadata]) -> str:
    """The prefix of the model's names in the checkpoint; "model." if none is found."""
    found = [other for other in there if (other == name or other.endswith(f".{name}")) and ".state." not in f".{other}"]
    return min(found, key=len)[: -len(name)] if found else "model."


def _trained(model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, nn.Parameter]]:
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    named = model.named_parameters()
    return ((below_wrappers(name), parameter) for name, parameter in named if id(parameter) in held)


def _optimizer_to_load(
    model: nn.Module, optimizer: Optimizer, metadata: Metadata, there: dict[str, TensorStorageMetadata]
) -> dict[str, Any]:
    base = _optimizer_prefix(metadata)
    if base is None:
        raise CheckpointDiffers("the checkpoint has no optimizer: load the model only. Nothing was overwritten.")
    names = dict(_trained(model, optimizer))
    if not optimizer.state:
        optimizer.zero_grad()  # torch creates no states while there are gradients
    states: Any = get_optimizer_state_dict(model, optimizer)["state"]
    kind_here = type(optimizer).__name__
    saved: dict[str, set[str]] = {}
    for key in metadata.state_dict_metadata:
        if key.startswith(f"{base}state."):
            name, _, kind = key[len(f"{base}state.") :].rpartition(".")
            saved.setdefault(name, set()).add(kind)
    differences = [f"it has states of {name}, which is not trained here" for name in saved.keys() - names.keys()]
    wanted = {}
    for name, kinds in saved.items():
        mine = states.get(name, {})
        differences += [f"{kind} of {name} is not in this {kind_here}" for kind in sorted(kinds - mine.keys())]
        for kind, value in mine.items():
            key = f"{base}state.{name}.{kind}"
            value = _as_saved(there.get(key), value)
            if kind in adamw8bit.CODES_OF and key in there:
                value = adamw8bit.to_read(names[name], value, there[key].size)
            wanted[key] = value
            if kind not in kinds:
                differences.append(f"{kind} of {name} is not in the checkpoint")
            elif isinstance(value, torch.Tensor) and (what := _difference(there.get(key), value)):
                differences.append(f"{kind} of {name} {what}")
    _raise_if(differences, f"the checkpoint is of another optimizer than this {kind_here}")
    groups = f"{base}param_groups."
    for name, entry in metadata.state_dict_metadata.items():
        if name.startswith(groups):
            is_tensor = isinstance(entry, TensorStorageMetadata)
            wanted[name] = torch.empty(entry.size, dtype=entry.properties.dtype) if is_tensor else None
    return wanted


def _optimizer_prefix(metadata: Metadata) -> str | None:
    for name in metadata.state_dict_metadata:
        before, found, _ = f".{name}".partition(".param_groups.")
        if found:
            return f"{before}."[1:]
    return None


def take(model: nn.Module, optimizer: Optimizer | None, loaded: dict[str, Any], metadata: Metadata) -> None:
    """Sets the optimizer's hyperparameters to the loaded ones, and drops states that the checkpoint does not have."""
    if optimizer is None:
        return
    base = _optimizer_prefix(metadata)
    names = dict(_trained(model, optimizer))
    for name, parameter in names.items():
        key = f"{base}state.{name}."
        if not any(other.startswith(key) for other in loaded):
            optimizer.state.pop(parameter, None)
        else:
            for kind in optimizer.state[parameter]:
                if not isinstance(optimizer.state[parameter][kind], torch.Tensor):
                    optimizer.state[parameter][kind] = loaded[key + kind]
            adamw8bit.requantise(untyped(parameter), optimizer.state[parameter], loaded, key)
    of = {id(parameter): name for name, parameter in names.items()}
    groups = f"{base}param_groups."
    lists = {key: each for key, each in loaded.items() if key.startswith(groups) and key.endswith(".params")}
    groups_of = {name: key.removesuffix("params") for key, names in lists.items() for name in names}
    for index, group in enumerate(optimizer.param_groups):
        first = of[id(group["params"][0])] if group["params"] else None
        by_index = groups_of.get(first, f"{groups}{index}.")  # groups may be in another order
        by_name = by_index if first is None else f"{groups}{first}."
        for name, value in loaded.items():
            for start in (by_index, by_name):
                kind = name[len(start) :]
                if name.startswith(start) and "." not in kind and kind != "params":
                    group[kind] = value
