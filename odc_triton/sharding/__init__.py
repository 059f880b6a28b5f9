"""From a module to its shards. Names are resolved on first use: `footprint` is here too, and needs no torch."""

from ..base.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
