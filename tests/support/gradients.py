"""Whole gradients by name, and whether they are the same but for rounding."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from bench.whole import whole


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(
    got: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor], tolerance: float = 1e-5, floor: float = 1e-6
) -> None:
    """By norm. `floor`: of the largest gradient's, for those that are zero in exact arithmetic, as of keys' biases."""
    assert got.keys() == want.keys()
    assert want
    least = floor * max(float(gradient.norm()) for gradient in want.values())
    for name, gradient in want.items():
        assert (got[name] - gradient).norm() <= tolerance * gradient.norm() + least, name
