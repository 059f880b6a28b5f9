"""Writes a sharded model into a Hugging Face folder, or its adapter into a PEFT folder."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..base.files import folder_aside
from ..engine.api import engine_of
from ..nn.operand import is_sharded
from .adapted import with_tokenizer
from .adapter import write_adapter
from .pretrained import transformers_part
from .pretrained_tensors import PretrainedTensors, require_written

SHARD_BYTES = 2 * 2**30
# What transformers and PEFT write and read again: of an older model, next to a new one without such a file.
_OF_A_MODEL = re.compile(
    r"((adapter_)?model(-\d+-of-\d+)?\.safetensors|(pytorch|adapter)_model(-\d+-of-\d+)?\.bin)(\.index\.json)?|"
    r"((generation_|adapter_|processor_|(video_)?preprocessor_|tokenizer_)?config|tokenizer|special_tokens_map|"
    r"added_tokens|vocab|chat_template)\.json|chat_template\.jinja|additional_chat_templates|vocab\.txt|merges\.txt|(tokenizer|spiece|sentencepiece\.bpe)\.model"
)
# Of a processor, in addition to its tokenizer's.
_OF_IMAGES = (
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
)


def save_pretrained(
    model: nn.Module,
    folder: str | Path,
    tokenizer: Any = None,
    *,
    processor: str | Path | None = None,
    dtype: torch.dtype | None = None,
    merge: bool = False,
    shard_bytes: int = SHARD_BYTES,
    overwrite: bool = False,
) -> None:
    """Writes config, safetensors and tokenizer, or processor, of a sharded transformers model, for plain transformers.

    Only rank 0 calls it, outside of a minibatch, while the others wait. Of a PEFT model it writes the adapter.
    Everything trained is written. Rank 0 temporarily holds one unit and one file's tensors in memory. The folder is
    written under a temporary name and renamed, so it is atomic.

    model: what `fully_shard` returned.
    folder: where to; it may not exist, or be empty.
    tokenizer: is saved too.
    processor: a folder or hub id, whose files for images are copied, if it has any.
    dtype: of the files, by default the compute dtype.
    merge: write the whole model, into which PEFT's code merges the adapter.
    shard_bytes: the most bytes of one file.
    overwrite: replace a model's files in the folder, and leave others.

    Raises TypeError for another kind of model, ValueError for `merge` without adapters, NotImplementedError for those
    that can't be merged and for trained parameters that would be left out, FileExistsError for a folder that is not
    empty unless `overwrite`, RuntimeError on other ranks and for parameters that have no values here, OSError if it
    can't write.
    """
    if not is_sharded(model):
        raise TypeError(f"{type(model).__name__} is not a sharded transformers model: save its state_dict() instead")
    if (engine := engine_of(model)).rank != 0 and not engine.is_alone:
        raise RuntimeError(f"save_pretrained was called on rank {engine.rank}: call it on rank 0 only")
    _, part = transformers_part(model)
    is_adapted = hasattr(model, "peft_config")
    if merge and not is_adapted:
        raise ValueError(f"merge=True, and {type(model).__name__} has no adapters: leave it out")
    require_written(model, merge=merge)
    with _naming(folder), folder_aside(folder, overwrite=overwrite, replaces=is_of_a_model) as aside:
        if is_adapted and not merge:
            write_adapter(model, aside, dtype)
        else:
            _write_model(model, part, aside, dtype, shard_bytes)
        if tokenizer is not None:
            save_processor(tokenizer, aside)
        if processor is not None:
            _copy_processor(processor, aside)


def is_of_a_model(name: str) -> bool:
    """True for a name of a file or folder of a model, adapter, tokenizer or processor."""
    return _OF_A_MODEL.fullmatch(name) is not None


def _copy_processor(source: str | Path, folder: Path) -> None:
    """From a folder, or for a hub id from the hub's cache. Copies, as a processor whose video processor can't be made
    without torchvision can't be saved.
    """
    from huggingface_hub import try_to_load_from_cache

    source = with_tokenizer(source) if Path(source).is_dir() else source  # nothing is asked of the hub at a run's end
    for name in _OF_IMAGES:
        found = Path(source, name)
        if not Path(source).exists():
            with contextlib.suppress(ValueError):  # for a folder that is gone
                found = try_to_load_from_cache(str(source), name)
        if isinstance(found, (str, Path)) and Path(found).is_file():
            shutil.copyfile(found, folder / name)


@contextlib.contextmanager
def _naming(folder: str | Path) -> Iterator[None]:
    """Adds `folder` to errors of writing in this block, which lack a file name."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        raise OSError(f"can't write {folder}: {error}") from error
    except OSError as error:
        if error.errno is not None:
            error.filename = error.filename or str(folder)
        raise


def _write_model(root: nn.Module, model: Any, folder: Path, dtype: torch.dtype | None, shard_bytes: int) -> None:
    from safetensors.torch import save_file

    tensors = PretrainedTensors(root, dtype=dtype, device="cpu")
    empty: Any = tensors.empty
    compute_dtypes = {p.leaf.dtype for p in engine_of(root).parameters if p.leaf.is_floating_point()}
    saved_dtype = dtype or (compute_dtypes.pop() if len(compute_dtypes) == 1 else model.dtype)
    empty.config.dtype = str(saved_dtype).removeprefix("torch.")
    empty.config.architectures = [type(empty).__name__]
    if empty.is_remote_code():
        from transformers.dynamic_module_utils import custom_object_save

        custom_object_save(empty, folder, config=empty.config)
    empty.config.save_pretrained(folder)
    if empty.can_generate():
        # `save_pretrained` refuses some that transformers itself has loaded: nothing here may cost a trained model.
        model.generation_config.to_json_file(folder / "generation_config.json", keys_to_pop=["compile_config"])
    files: list[list[str]] = []
    total_bytes = 0
    for chunk in tensors.chunks(shard_bytes):
        part = folder / f"part-{len(files)}"
        save_file(dict(chunk), part, metadata={"format": "pt"})
        shutil.copymode(folder / "config.json", part)  # else only its owner can read it
        files.append([name for name, _ in chunk])
        total_bytes += sum(value.nbytes for _, value in chunk)
        chunk.clear()  # before the next one is read
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


def save_processor(processor: Any, folder: Path) -> None:
    """Its `save_pretrained`, or what that writes, without videos, for one that has None for its video processor."""
    if getattr(processor, "video_processor", "") is not None:
        processor.save_pretrained(folder)
        return
    processor.tokenizer.save_pretrained(folder)
    if processor.chat_template is not None:
        (folder / "chat_template.jinja").write_text(processor.chat_template)
    config = {name: value for name, value in processor.to_dict().items() if value is not None}
    (folder / "processor_config.json").write_text(json.dumps(config))
