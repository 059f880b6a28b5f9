"""NEFTune's noise on packs: scaled by each sample's own length, as in transformers' hook for a single sample."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .enable import innermost


@contextmanager
def embedding_noise(model: nn.Module, alpha: float | None, pack: Mapping[str, Any]) -> Iterator[None]:
    """Within the block, a training forward of `pack` adds uniform noise of up to alpha / sqrt(L * D) to the embeddings.

    L: tokens of a token's sample. D: width of the embeddings. Without `alpha` nothing is added. Raises ValueError for
    segments of samples.
    """
    if alpha is None:
        yield
        return
    if "segments" in pack:
        raise ValueError(
            "neftune_noise_alpha is set, and this pack has segments of samples, which don't know their sample's "
            "length: leave it out"
        )
    lengths = pack["cu_seq_lens_q"].diff()

    def add(module: nn.Module, _: Any, output: Tensor) -> Tensor:
        if not module.training:
            return output
        largest = alpha / (lengths * output.shape[-1]).sqrt()
        largest = largest.repeat_interleave(lengths, output_size=output.shape[-2])[:, None]
        return output + torch.zeros_like(output).uniform_(-1, 1) * largest.to(output.dtype)

    hook = innermost(model).get_input_embeddings().register_forward_hook(add)
    try:
        yield
    finally:
        hook.remove()
