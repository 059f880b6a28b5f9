"""Assignment of samples to ranks and microbatches. The public names, nothing else.

Usable without a sharded model, also under plain FSDP2. Names are resolved on first use: only what makes tensors of
packs, and `store_counter`, import torch, and nothing here needs a device.
"""

from ..base.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
