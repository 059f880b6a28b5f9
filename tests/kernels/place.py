"""Where the kernels run: on the GPU if there is one, else on CPU tensors in Triton's interpreter.

To be imported before any kernel: jit functions are made at import. With TRITON_INTERPRET=1 set from outside, the
interpreter is used on a machine with a GPU too.
"""

from __future__ import annotations

import os

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() and not os.environ.get("TRITON_INTERPRET") else "cpu"
INTERPRETED = DEVICE == "cpu"
if INTERPRETED:
    os.environ["TRITON_INTERPRET"] = "1"

MARKS = [pytest.mark.usefixtures("on_device"), *([] if INTERPRETED else [pytest.mark.gpu])]
"""`pytestmark` of every file of kernel tests: `pytest -m gpu` runs them where they run on a GPU."""
