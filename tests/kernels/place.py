"""Where the kernels run: on the GPU if there is one, else on CPU tensors in Triton's interpreter.

To be imported before any kernel, as ranks of a test do that begin in another process.
"""

from __future__ import annotations

import pytest

from bench.operators.place import DEVICE

INTERPRETED = DEVICE.type == "cpu"

MARKS = [pytest.mark.usefixtures("on_device"), *([] if INTERPRETED else [pytest.mark.gpu])]
"""`pytestmark` of every file of kernel tests: `pytest -m gpu` runs them where they run on a GPU."""
