"""Sharded models in and out of files: torch's distributed checkpoints, Hugging Face folders."""

from .pretrained import load_causal_lm, save_pretrained

__all__ = ["load_causal_lm", "save_pretrained"]
