"""Optimizers whose update needs more than a rank's own rows."""

from typing import TYPE_CHECKING

from ..base.lazy import lazy_names

if TYPE_CHECKING:
    from .chained import ChainedOptimizer as ChainedOptimizer
    from .muon import Muon as Muon

__getattr__, __dir__, __all__ = lazy_names(__name__, {"Muon": "muon", "ChainedOptimizer": "chained"})
