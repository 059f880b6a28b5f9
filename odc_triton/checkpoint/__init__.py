"""Sharded models in and out of files: torch's distributed checkpoints, Hugging Face folders."""

from ..base.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
