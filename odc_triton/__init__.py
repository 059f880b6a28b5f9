"""odc-triton: sharded training by on-demand communication. The public names, nothing else.

Names are resolved on first use, so that `import odc_triton` costs next to nothing over `import torch`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy as MixedPrecisionPolicy

    from .base.errors import DeadlineExceeded as DeadlineExceeded
    from .base.errors import MinibatchFailed as MinibatchFailed
    from .base.errors import OdcError as OdcError
    from .base.errors import RankLost as RankLost
    from .base.errors import RanksDiffer as RanksDiffer
    from .engine.api import begin_minibatch as begin_minibatch
    from .engine.api import end_minibatch as end_minibatch
    from .engine.api import full_parameters as full_parameters
    from .engine.api import minibatch as minibatch
    from .engine.api import publish as publish
    from .engine.api import register_fsdp_forward_method as register_fsdp_forward_method
    from .nn.head import log_probs as log_probs
    from .nn.replace import replace_layers as replace_layers
    from .nn.verification import verify as verify
    from .sharding.footprint import memory_plan as memory_plan
    from .sharding.shard import fully_shard as fully_shard

_API = (
    "begin_minibatch",
    "end_minibatch",
    "full_parameters",
    "minibatch",
    "publish",
    "register_fsdp_forward_method",
)
_ERRORS = ("DeadlineExceeded", "MinibatchFailed", "OdcError", "RankLost", "RanksDiffer")
_HOME = {
    **dict.fromkeys(_API, "odc_triton.engine.api"),
    **dict.fromkeys(_ERRORS, "odc_triton.base.errors"),
    "MixedPrecisionPolicy": "torch.distributed.fsdp",
    "fully_shard": "odc_triton.sharding.shard",
    "log_probs": "odc_triton.nn.head",
    "memory_plan": "odc_triton.sharding.footprint",
    "replace_layers": "odc_triton.nn.replace",
    "verify": "odc_triton.nn.verification",
}
__all__ = sorted(_HOME)
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'odc_triton' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
