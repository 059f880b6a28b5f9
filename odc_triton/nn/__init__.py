"""Layers on sharded parameters, with torch's names, arguments and state-dict keys. Names are resolved on first use."""

from ..base.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
