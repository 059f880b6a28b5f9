"""The adapter of a LoRA policy for vLLM.

[Note: adapter or merged model] vLLM keeps the base that it loaded, if it is the policy's, and each update is an adapter
with a name of its own: no request and no cached prefix has two. Other policies it gets merged; rank 0 prints why.
"""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

from ...base.errors import in_a_line
from ...checkpoint.adapter import lora_factors, write_adapter
from ...checkpoint.pretrained import require_base
from ...engine.api import engine_of


def lora_rank(rank: int) -> int:
    """The smallest of vLLM's max_lora_rank that has room for `rank`, or the largest."""
    return next((each for each in (8, 16, 32, 64, 128, 256, 320) if each >= rank), 512)


def takes_adapter(model: nn.Module, folder_of: Callable[[dict[str, torch.Tensor]], str]) -> bool:
    """See the note. `folder_of(factors)`: vLLM's base; raises if vLLM does not take these. Collective."""
    engine, problem = engine_of(model), None
    try:
        _, factors = lora_factors(model)
        if not factors:
            return False
        require_base(model, folder_of(factors))
    except Exception as error:  # of vLLM's classes too
        problem = in_a_line(error)
    answers = engine.exchange("compare the base with vLLM's", {"problem": problem})
    problem = next((each["problem"] for each in answers if each["problem"]), None)
    if problem and engine.rank == 0:
        print(f"vLLM gets the merged model at each update, not the adapter alone: {problem}", flush=True)
    return problem is None


@contextlib.contextmanager
def adapter_folder(model: nn.Module) -> Iterator[str]:
    """PEFT's files in a private folder in memory, removed also if this process is killed."""
    folder = tempfile.mkdtemp(prefix="odc-adapter-", dir="/dev/shm")
    remover = ["sh", "-c", 'read -r _; rm -rf "$0"', folder]
    with subprocess.Popen(remover, stdin=subprocess.PIPE, start_new_session=True):
        write_adapter(model, Path(folder), None)
        yield folder
