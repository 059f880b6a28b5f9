"""Optimizers for sharded parameters, in addition to torch's."""

from ..base.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
