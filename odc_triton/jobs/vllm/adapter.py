"""The adapter of a LoRA policy for vLLM.

[Note: adapter or merged model] vLLM keeps the base that it loaded, if it is the policy's, and each update is an adapter
with a name of its own: no request and no cached prefix has two. Other policies it gets merged; rank 0 prints why.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import nn

from ...base.errors import GenerationFailed, in_a_line
from ...checkpoint.adapter import lora_factors, write_adapter
from ...checkpoint.parameters import is_packed
from ...checkpoint.pretrained import require_base
from ...engine.api import engine_of
from .http import Refused

FolderOf = Callable[[dict[str, torch.Tensor]], str]  # vLLM's base; raises if vLLM does not take these factors


def room_for(rank: int) -> int:
    """The smallest of vLLM's max_lora_rank that has room for `rank`, or the largest."""
    return next((each for each in (8, 16, 32, 64, 128, 256, 320) if each >= rank), 512)


def takes_adapter(model: nn.Module, folder_of: FolderOf, load: Callable[[], None], *, merges_packed: bool) -> bool:
    """See the note. True after the first `load()`. `merges_packed`: vLLM can get quantised bases merged, too.

    Collective. Raises GenerationFailed if vLLM is gone, or can't get the policy at all.
    """
    if not getattr(model, "peft_config", None):
        return False
    engine, packed = engine_of(model), any(map(is_packed, model.modules()))
    for step in (partial(_compare, model, folder_of), load):
        problem, is_lost = None, packed and not merges_packed
        try:
            step()
        except Exception as error:  # of vLLM's classes too
            problem = in_a_line(error)
            is_lost |= isinstance(error, GenerationFailed) and not isinstance(error, Refused)
        answers = engine.exchange("vLLM gets the adapter", {"problem": problem, "is_lost": is_lost})
        if problem := next((each["problem"] for each in answers if each["problem"]), None):
            if any(each["is_lost"] for each in answers):
                raise GenerationFailed(f"vLLM can't get the policy's adapter, and not merged either: {problem}")
            if engine.rank == 0:
                print(f"vLLM gets the merged model at each update, not the adapter alone: {problem}", flush=True)
            return False
    if packed and engine.rank == 0:
        print("vLLM computes with its own base, with which the quantised one was not compared", flush=True)
    return True


def _compare(model: nn.Module, folder_of: FolderOf) -> None:
    """Raises if vLLM's base with the adapter, as vLLM would read it, is not the policy."""
    config, factors = lora_factors(model)
    # vLLM has not always read patterns; and other initial values than these may have changed the base.
    plain = {"rank_pattern": [{}], "alpha_pattern": [{}], "init_lora_weights": [True, False, "gaussian", "orthogonal"]}
    if wrong := next((f"{name} {config[name]!r}" for name, known in plain.items() if config[name] not in known), None):
        raise NotImplementedError(f"vLLM would not compute with the adapter's {wrong}")
    require_base(model, folder_of(factors))


@contextlib.contextmanager
def adapter_folder(model: nn.Module) -> Iterator[str]:
    """PEFT's files in a private folder in memory. Removes those of processes that were killed."""
    names = os.stat("/proc/self/ns/pid").st_ino  # containers may share the memory
    for each in Path("/dev/shm").glob(f"odc-adapter-{names}-*"):
        with contextlib.suppress(OSError):  # another rank removes it, too
            if each.stat().st_uid == os.getuid() and not Path("/proc", each.name.split("-")[3]).exists():
                shutil.rmtree(each)
    with tempfile.TemporaryDirectory(prefix=f"odc-adapter-{names}-{os.getpid()}-", dir="/dev/shm") as folder:
        try:
            write_adapter(model, Path(folder), None)
        except Exception as error:
            raise OSError(f"the adapter can't be written to {folder}: {in_a_line(error)}") from error
        yield folder
