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
from tests.support import interpreter

INTERPRETED = DEVICE.type == "cpu"
if INTERPRETED:
    interpreter.patch_once()

MARKS = [pytest.mark.usefixtures("on_device"), *([] if INTERPRETED else [pytest.mark.gpu])]
"""`pytestmark` of every file of kernel tests: `pytest -m gpu` runs them where they run on a GPU."""


def matrix(shapes: list[tuple], dtypes: list[torch.dtype], mixed: list[tuple]) -> list[Any]:
    """Cases (world, shape, dtype) for `parametrize`: on 3 ranks all shapes in fp32 and those of `mixed` in all dtypes,
    on 1 and 8 ranks the first of `mixed`. Slow ones are fp16's, which goes bf16's way; `pytest -m gpu` runs them too.
    """
    found = [(3, shape, torch.float32) for shape in shapes]
    found += [(world, mixed[0], torch.float32) for world in (1, 8)]
    found += [(3, shape, dtype) for shape, dtype in itertools.product(mixed, dtypes) if dtype != torch.float32]
    return [
        pytest.param(
            *case, id=f"{case[2]}-{case[1]}-{case[0]}", marks=[pytest.mark.slow] if case[2] == torch.float16 else []
        )
        for case in dict.fromkeys(found)
    ]


def close(
    got: torch.Tensor, want: torch.Tensor, tolerance: float, what: str = "", *, least: float = 0.0, rtol: float = -1.0
) -> None:
    """Both up to `tolerance` of an element (or `rtol`) and of the largest one, or of `least` if that is more: terms of
    that size may cancel. NaN, as in memory that nobody wrote, only where `want` has it.
    """
    assert torch.equal(got.isfinite(), want.isfinite()), f"{what}: unwritten elements, or NaN where rows were written"
    atol = tolerance * (max(want.nan_to_num().abs().max().item(), least) if want.numel() else 1.0)
    near = {"rtol": tolerance if rtol < 0 else rtol, "atol": atol, "equal_nan": True}
    torch.testing.assert_close(got.double(), want.double(), **near, msg=lambda text: f"{what}: {text}")


_CANARY = 64  # elements: a multiple of 16 bytes in any dtype
_NUMBER = 7  # in canaries of integers
guarded: list[torch.Tensor] = []
"""The memory of all shards that a test has made: conftest.py checks it when the test ends."""


def split(whole: torch.Tensor, world: int) -> list[torch.Tensor]:
    """As `peers.shards_of`, with a canary before and after each shard: -0.0, which any addition but of -0.0 changes."""
    shards, canary = peers.shards_of(whole, world), -0.0 if whole.is_floating_point() else _NUMBER
    for owner, shard in enumerate(shards):
        guarded.append(whole.new_full((shard.numel() + 2 * _CANARY,), canary))
        shards[owner] = guarded[-1][_CANARY:-_CANARY].view(shard.shape).copy_(shard)
    return shards


def is_intact(memory: torch.Tensor) -> bool:
    """Whether nothing was stored or added outside the shard in `memory`."""
    ends = torch.cat((memory[:_CANARY], memory[-_CANARY:]))
    return bool(((ends == 0) & ends.signbit() if ends.is_floating_point() else ends == _NUMBER).all())
