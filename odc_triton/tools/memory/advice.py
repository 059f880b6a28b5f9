"""What to change in a run that is out of memory, with the bytes that `memory_plan` predicts."""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from typing import Any

from ...base.errors import TRACEBACK, in_a_line
from ...jobs.options.options import flag
from ...jobs.train.run_options import RunOptions

# Of CUDA, of torch's allocator on the CPU, of Python, of mmap; and of the launcher, for what the kernel killed.
_SIGNS = re.compile(r"out ?of ?memory|MemoryError|can(?:'|no)t allocate memory", re.IGNORECASE)


@contextmanager
def advising(options: Any, ranks: int) -> Iterator[None]:
    """An error of a run (not of a sweep) without memory goes on as a RuntimeError that also says what to change."""
    try:
        yield
    except (OSError, RuntimeError, MemoryError) as error:
        said, advice = in_a_line(error), ""
        text, mark, trace = said.partition(TRACEBACK)
        text = text.removesuffix(".")
        # A reward's process has memory of its own.
        if _SIGNS.search(said) and " in reward " not in said and isinstance(options, RunOptions):
            # At once: to plan a hybrid takes many seconds.
            print(f"odc-triton: {text}. Looking for what needs less memory", file=sys.stderr, flush=True)
            with suppress(Exception), warnings.catch_warnings():  # the first error counts, whatever comes of this
                warnings.simplefilter("ignore")
                advice = _advice(options, ranks)
        if not advice:
            raise
        raise RuntimeError(f"{text}.\n{advice}{mark}{trace}") from error


def _advice(options: RunOptions, ranks: int) -> str:
    """Bytes per rank of the trained model, and with the options that lower them most."""
    import torch

    options = options.on("cuda" if torch.cuda.is_available() else "cpu")
    planned, lora = _planner(options), {} if options.lora_rank else {"lora_rank": 16}
    now = planned(options, ranks)
    changes = [{"gradient_checkpointing": True}, {"offload_activations": True}, {"token_cap": options.token_cap // 2}]
    changes += [{"dtype": "bf16"}, {"optimizer": "adamw-8bit"}, {"lora_rank": 16}, lora | {"quantize": "nf4"}]
    found = [(planned(options, 2 * ranks).total_bytes, f"{2 * ranks} ranks")] if now.backend == "cuda" else []
    for change in changes:
        words = " ".join(flag(name) + ("" if value is True else f" {value}") for name, value in change.items())
        with suppress(Exception):  # it does not go with others, or its adapters don't fit here
            found.append((planned(replace(options, **change), ranks).total_bytes, words))
    less = [f"{words}: {n_bytes / 1e9:,.3g} GB" for n_bytes, words in sorted(found) if n_bytes < 0.95 * now.total_bytes]
    lower = "--gradient-checkpointing and " * (not options.gradient_checkpointing) + "a smaller --token-cap"
    without = "" if now.activation_bytes_per_token else f" without activations, which {lower} would lower"
    said = f"memory_plan predicts {now.total_bytes / 1e9:,.3g} GB per rank for the trained model{without}"
    return f"{said}. Less with {'; '.join(less[:4]) or 'no option that it knows of'}"


def _planner(given: RunOptions) -> Callable[[RunOptions, int], Any]:
    """Plans options that differ from those `given`, on the meta device; a model only once."""
    from ...checkpoint import meta_causal_lm
    from ...jobs.train.model import adapt, precision
    from .footprint import memory_plan

    @cache
    def model(lora_rank: int) -> Any:
        return adapt(meta_causal_lm(model=given.model, init=given.init), replace(given, lora_rank=lora_rank), rank=1)

    def planned(options: RunOptions, ranks: int) -> Any:
        replicas = options.replicas or max(ranks // int(os.environ.get("LOCAL_WORLD_SIZE", ranks)), 1)
        same = ("quantize", "optimizer", "gradient_checkpointing", "exact", "split_cuts")
        how: dict[str, Any] = {name: getattr(options, name) for name in same}
        how |= {"offload_checkpoints": options.offload_activations}
        how |= {"replicas": replicas, "mp_policy": precision(options.dtype), "tokens_per_microbatch": options.token_cap}
        how |= {"split_tokens": options.split_tokens or options.token_cap * options.split_sequences}
        return memory_plan(model(options.lora_rank), ranks // replicas, expert_cache_bytes=options.expert_cache, **how)

    return planned
