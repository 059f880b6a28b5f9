"""The random states of a rank."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import torch


def random_state() -> dict[str, Any]:
    """The states of torch's generator, the current GPU's if one is in use, and Python's."""
    on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    version, words, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "cuda": torch.cuda.get_rng_state().numpy().tobytes().hex() if on_gpu else None,
        "python": [version, list(words), gauss],
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Restores the result of `random_state`; a GPU's state only if there is a GPU now."""
    torch.set_rng_state(_as_tensor(state["torch"]))
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(_as_tensor(state["cuda"]))
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))


def seed_random_state(*numbers: int) -> None:
    """Seeds all these generators from `numbers`, in the same way on every machine."""
    seed = int.from_bytes(hashlib.sha256(repr(numbers).encode()).digest()[:8], "little") >> 1
    torch.manual_seed(seed)
    random.seed(seed)


def _as_tensor(hexadecimal: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(hexadecimal), dtype=torch.uint8)
