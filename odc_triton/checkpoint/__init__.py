"""Sharded models in and out of files: torch's distributed checkpoints, Hugging Face folders."""

from .adapter import with_adapter
from .export import save_pretrained
from .pretrained import load_causal_lm, load_pretrained_shards, meta_causal_lm

__all__ = ["load_causal_lm", "load_pretrained_shards", "meta_causal_lm", "save_pretrained", "with_adapter"]
