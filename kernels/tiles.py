"""Tile configurations as data: what the kernels run with unless a launcher is told otherwise."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearTile:
    """`t`: tokens of a tile; `n`: output features; `k`: input features. The loop runs over `k` for y, `n` for dx."""

    t: int = 64
    n: int = 64
    k: int = 64
    num_warps: int = 4
    num_stages: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class WgradTile:
    """`n` and `k`: a tile's rows and columns of dW; `t`: tokens per step of the loop; `group`: row tiles per column."""

    n: int = 128
    k: int = 128
    t: int = 64
    group: int = 8
    num_warps: int = 8
    num_stages: int = 3


LINEAR = LinearTile()
LINEAR_DX = LinearTile(num_stages=2)  # a third stage spills on sm_120
WGRAD = WgradTile()
WGRAD_FP32 = WgradTile(n=64, k=64, t=32, num_stages=2)  # operands twice as large: the other does not fit sm_120
