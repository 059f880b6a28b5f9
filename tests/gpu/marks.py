"""The marks of every file here, whose tests need a CUDA device, and which device each rank of a test takes."""

from __future__ import annotations

import pytest
import torch

MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
# Ranks take a GPU each as far as there are several, so that they do cross the link. Some tests are run once more with
# all ranks on the first one: there they share its memory and take turns.
ONE_GPU = pytest.mark.parametrize(
    "one_gpu",
    [
        pytest.param(False, id="spread"),
        pytest.param(
            True,
            id="one-gpu",
            marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="as spread, where there is one GPU"),
        ),
    ],
)


def gpu_of(rank: int, *, one_gpu: bool = False) -> int:
    return 0 if one_gpu else rank % torch.cuda.device_count()


def take_gpu(rank: int, *, one_gpu: bool = False) -> None:
    torch.cuda.set_device(gpu_of(rank, one_gpu=one_gpu))
