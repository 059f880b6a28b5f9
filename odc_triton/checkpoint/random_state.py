"""This process's random numbers as words that JSON can hold."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import torch


def random_state() -> dict[str, Any]:
    """torch's generator, its current GPU's where one is in use, and Python's."""
    on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    version, words, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "cuda": torch.cuda.get_rng_state().numpy().tobytes().hex() if on_gpu else None,
        "python": [version, list(words), gauss],
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Goes on from what `random_state` returned. A GPU's state is left out where there is no GPU now."""
    torch.set_rng_state(_as_tensor(state["torch"]))
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(_as_tensor(state["cuda"]))
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))


def seed_random_state(*numbers: int) -> None:
    """Seeds all of them from `numbers` together, the same way on every machine."""
    seed = int.from_bytes(hashlib.sha256(repr(numbers).encode()).digest()[:8], "little") >> 1
    torch.manual_seed(seed)
    random.seed(seed)


def _as_tensor(hexadecimal: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(hexadecimal), dtype=torch.uint8)
