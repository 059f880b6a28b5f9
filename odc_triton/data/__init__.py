"""Tokenizers for `train`. The public names, nothing else."""

from ..base.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
