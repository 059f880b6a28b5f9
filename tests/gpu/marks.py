"""The marks of every file here: its tests need a CUDA device."""

from __future__ import annotations

import pytest
import torch

MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
