"""Which rank computes which samples, in which microbatches. The public names, nothing else.

Usable without the rest of the library, also under plain FSDP2. Names are resolved on first use: only `collate` and
`counter` (see `_HOME`) import torch, and nothing here needs a device.
"""

from __future__ import annotations

import importlib

_HOME = {
    "BALANCES": "strategies",
    "CostModel": "cost",
    "MinibatchSampler": "sampler",
    "PackedDataset": "collate",
    "QueuedPacks": "queue",
    "assign": "strategies",
    "assign_one": "strategies",
    "balanced_partition": "partition",
    "best_fit_decreasing": "packing",
    "count_target_tokens": "collate",
    "global_packing": "strategies",
    "karmarkar_karp": "partition",
    "lb_micro": "strategies",
    "lb_mini": "strategies",
    "local_sort": "strategies",
    "pack": "packing",
    "pack_collate": "collate",
    "queue_packs": "queue",
    "refine": "partition",
    "store_counter": "counter",
    "to_device": "collate",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'odc_triton.balance' has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
