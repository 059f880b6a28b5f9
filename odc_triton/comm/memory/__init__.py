"""Symmetric memory: regions that every rank of a job can read and add to."""

from ...base.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
