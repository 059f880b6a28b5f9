"""Tensors that say where they are."""

from __future__ import annotations

import torch


class OnGpu(torch.Tensor):
    """Says that it is on a GPU."""

    is_cuda = True
