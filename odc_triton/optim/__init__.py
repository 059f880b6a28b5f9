"""Optimizers whose update needs more than a rank's own rows."""

from typing import TYPE_CHECKING

from ..base.lazy import lazy_names

if TYPE_CHECKING:
    from .muon import Muon as Muon
    from .together import Together as Together

__getattr__, __dir__, __all__ = lazy_names(__name__, {"Muon": "muon", "Together": "together"})
