"""Optimizers whose update needs more than a rank's own rows."""

from ..base.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
