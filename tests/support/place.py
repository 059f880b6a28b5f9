"""Where the kernels run: on the GPU if there is one, else on CPU tensors in Triton's interpreter.

Import it before any kernel, as a test's ranks in other processes do.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from bench.kernels.problem import DEVICE
from odc_kernels import peers

INTERPRETED = DEVICE.type == "cpu"

MARKS = [pytest.mark.usefixtures("on_device"), *([] if INTERPRETED else [pytest.mark.gpu])]
"""`pytestmark` of every file of kernel tests: `pytest -m gpu` runs them where they run on a GPU."""


def matrix(worlds: list[int], shapes: list[tuple], dtypes: list[torch.dtype], mixed: list[tuple]) -> list[Any]:
    """All (world, shape, dtype), for `parametrize`. All are slow except all shapes in fp32 with 1 and 3 ranks, and of
    `mixed` those with 3 ranks in all dtypes, and the first in fp32 with 8. `pytest -m gpu` runs all.
    """
    found = []
    for world, shape, dtype in itertools.product(worlds, shapes, dtypes):
        most = mixed[:1] if world == 8 else shapes if world in (1, 3) else []
        is_fast = (dtype == torch.float32 and shape in most) or (world == 3 and shape in mixed)
        marks = [] if is_fast else [pytest.mark.slow]
        found.append(pytest.param(world, shape, dtype, id=f"{dtype}-{shape}-{world}", marks=marks))
    return found


_CANARY = 64  # elements: a multiple of 16 bytes in any dtype
_NUMBER = 7  # in canaries of integers
guarded: list[torch.Tensor] = []
"""The memory of all shards that a test has split: conftest.py looks at it when the test ends."""


def split(whole: torch.Tensor, world: int) -> list[torch.Tensor]:
    """As `peers.split`, with a canary before and after each shard: -0.0, which any addition but of -0.0 changes."""
    shards, canary = peers.split(whole, world), -0.0 if whole.is_floating_point() else _NUMBER
    for owner, shard in enumerate(shards):
        guarded.append(whole.new_full((shard.numel() + 2 * _CANARY,), canary))
        shards[owner] = guarded[-1][_CANARY:-_CANARY].view(shard.shape).copy_(shard)
    return shards


def is_intact(memory: torch.Tensor) -> bool:
    """Whether nothing was stored or added outside the shard in `memory`."""
    ends = torch.cat((memory[:_CANARY], memory[-_CANARY:]))
    return bool(((ends == 0) & ends.signbit() if ends.is_floating_point() else ends == _NUMBER).all())
