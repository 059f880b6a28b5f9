"""Random numbers of sampling: a function of (seed, step, prompt, generation), whoever samples."""

from __future__ import annotations

import hashlib
import random


def completion_seed(seed: int, step: int, prompt: int, generation: int) -> int:
    """63 bits for one completion. `prompt`: its place among the step's prompts."""
    digest = hashlib.blake2b(f"{seed} {step} {prompt} {generation}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def prompts_of_step(count: int, step: int, *, per_step: int, seed: int) -> list[int]:
    """Which of `count` prompts step `step` takes, from 0: the next `per_step` of one shuffle after another."""
    places = range(step * per_step, (step + 1) * per_step)
    orders = {epoch: _order(count, seed, epoch) for epoch in {place // count for place in places}}
    return [orders[place // count][place % count] for place in places]


def _order(count: int, seed: int, epoch: int) -> list[int]:
    # Only Random.random is promised to give the same numbers in every Python; shuffle is not.
    generator = random.Random(f"prompts {seed} {epoch}")
    keys = [generator.random() for _ in range(count)]
    return sorted(range(count), key=keys.__getitem__)
