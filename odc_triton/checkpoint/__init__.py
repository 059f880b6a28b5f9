"""Sharded models in and out of files: torch's distributed checkpoints, Hugging Face folders."""

from typing import TYPE_CHECKING

from ..base.lazy import lazy_names

if TYPE_CHECKING:
    from .adapter import with_adapter as with_adapter
    from .pretrained import load_causal_lm as load_causal_lm
    from .pretrained import load_pretrained_shards as load_pretrained_shards
    from .pretrained import meta_causal_lm as meta_causal_lm
    from .write_pretrained import save_pretrained as save_pretrained

_HOME = {
    "load_causal_lm": "pretrained",
    "load_pretrained_shards": "pretrained",
    "meta_causal_lm": "pretrained",
    "save_pretrained": "write_pretrained",
    "with_adapter": "adapter",
}
__getattr__, __dir__, __all__ = lazy_names(__name__, _HOME)
