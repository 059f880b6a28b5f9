"""Assignment of samples to ranks and microbatches. The public names, nothing else.

Usable without the rest of the library, also under plain FSDP2. Names are resolved on first use: only `collate` and
`counter` (see `_HOME`) import torch, and nothing here needs a device.
"""

from ..base.lazy import lazy_names

_HOME = {
    "BALANCES": "strategies",
    "CostModel": "cost",
    "MinibatchSampler": "sampler",
    "PackedDataset": "collate",
    "QueuedPacks": "queue",
    "TowerCost": "tower",
    "assign": "strategies",
    "assign_one": "strategies",
    "balanced_partition": "partition",
    "best_fit_decreasing": "packing",
    "count_target_tokens": "collate",
    "find_relatives": "relatives",
    "floor_of": "relatives",
    "pack": "packing",
    "pack_collate": "collate",
    "queue_packs": "queue",
    "refine": "partition",
    "store_counter": "counter",
    "to_device": "collate",
    "values_of": "tower",
}
__getattr__, __dir__, __all__ = lazy_names(__name__, _HOME)
