"""Writes a sharded model into a Hugging Face folder, or its adapter into a PEFT folder."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..base.files import folder_aside
from ..engine.api import engine_of
from ..nn.operand import is_sharded
from .adapter import adapted_weights, merged, write_adapter
from .pretrained import empty_copy, tensors_by_unit, transformers_part
from .sharded import read_whole, sharded_parameters

SHARD_BYTES = 2 * 2**30


def save_pretrained(
    model: nn.Module,
    folder: str | Path,
    tokenizer: Any = None,
    *,
    dtype: torch.dtype | None = None,
    merge: bool = False,
    shard_bytes: int = SHARD_BYTES,
    overwrite: bool = False,
) -> None:
    """Writes config, safetensors and tokenizer of a sharded transformers model, for plain transformers to load.

    Only rank 0 calls it, outside of a minibatch, while the others wait. Of a PEFT model it writes the adapter, or with
    `merge` the whole model, with LoRA added to its base. Parameters are saved in `dtype`, by default the compute dtype.
    Meanwhile rank 0 holds one unit and one file's tensors, `shard_bytes`, in memory. The folder is written aside and
    renamed, so it exists whole or not at all.

    Raises TypeError for another kind of model, ValueError for `merge` without adapters, NotImplementedError for those
    that can't be added, FileExistsError for a folder that is not empty unless `overwrite`, RuntimeError on other ranks
    and for parameters that have no values here, OSError.
    """
    if dist.is_initialized() and dist.get_rank() != 0:
        raise RuntimeError(f"save_pretrained was called on rank {dist.get_rank()}: call it on rank 0 only")
    if not is_sharded(model):
        raise TypeError(f"{type(model).__name__} is not a sharded transformers model: save its state_dict() instead")
    prefix, part = transformers_part(model)
    if merge and not prefix:
        raise ValueError(f"merge=True, and {type(model).__name__} has no adapters: leave it out")
    with _naming(folder), folder_aside(folder, overwrite=overwrite) as aside:
        if prefix and not merge:
            write_adapter(model, aside, dtype)
        else:
            _write_model(model, part, aside, dtype, shard_bytes)
        if tokenizer is not None:
            tokenizer.save_pretrained(aside)


@contextlib.contextmanager
def _naming(folder: str | Path) -> Iterator[None]:
    """Errors of writing in this block name `folder`: neither safetensors nor writing itself names a file."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        raise OSError(f"can't write {folder}: {error}") from error
    except OSError as error:
        if error.errno is not None:
            error.filename = error.filename or str(folder)
        raise


def _write_model(root: nn.Module, model: nn.Module, folder: Path, dtype: torch.dtype | None, shard_bytes: int) -> None:
    from safetensors.torch import save_file
    from transformers.core_model_loading import revert_weight_conversion

    empty = empty_copy(model)
    compute_dtypes = {p.leaf.dtype for p in engine_of(root).parameters if p.leaf.is_floating_point()}
    saved_dtype = dtype or (compute_dtypes.pop() if len(compute_dtypes) == 1 else model.dtype)
    empty.config.dtype = str(saved_dtype).removeprefix("torch.")
    empty.config.architectures = [type(empty).__name__]
    if empty.is_remote_code():
        from transformers.dynamic_module_utils import custom_object_save

        custom_object_save(empty, folder, config=empty.config)
    empty.config.save_pretrained(folder)
    if empty.can_generate():
        model.generation_config.save_pretrained(folder)
    files: list[list[str]] = []
    pending: dict[str, torch.Tensor] = {}
    total_bytes = 0

    def flush() -> None:
        part = folder / f"part-{len(files)}"
        save_file(pending, part, metadata={"format": "pt"})
        shutil.copymode(folder / "config.json", part)  # safetensors lets nobody else read it
        files.append(list(pending))
        pending.clear()

    for group in _tensors_by_unit(root, model, empty, dtype):
        for name, value in revert_weight_conversion(empty, group).items():
            if pending and sum(each.nbytes for each in pending.values()) + value.nbytes > shard_bytes:
                flush()
            pending[name] = value.contiguous()
            total_bytes += value.nbytes
    flush()
    if len(files) == 1:
        (folder / "part-0").rename(folder / "model.safetensors")
        return
    weight_map = {}
    for number, names in enumerate(files):
        name = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        (folder / f"part-{number}").rename(folder / name)
        weight_map |= dict.fromkeys(names, name)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _tensors_by_unit(
    root: nn.Module, model: nn.Module, empty: nn.Module, dtype: torch.dtype | None
) -> Iterator[dict[str, torch.Tensor]]:
    """Each unit's parameters and persistent buffers together: transformers merges only tensors of the same unit.

    `model`: the transformers model, within `root` if that is PEFT's wrapper, whose adapters are added to it.
    """
    missing = [name for name, value in model.named_parameters() if value.is_meta]
    if missing:
        raise RuntimeError(f"no values for {missing[:3]}: they were not sharded (ignored_params)")
    parameters = sharded_parameters(root)
    adapted = adapted_weights(model) if root is not model else {}

    def read(value: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        return read_whole(root, parameters.get(id(value), value), dtype)

    def added(value: torch.Tensor, adapters: list[tuple[Any, str]]) -> torch.Tensor:
        whole = merged(read(value), adapters, read)
        return whole.to(dtype or whole.dtype)

    for group in tensors_by_unit(model, empty):
        yield {
            name: added(value, adapted[name]) if name in adapted else read(value, dtype)
            for name, value in group.items()
        }
