"""Where operators run: on the GPU if there is one, else on CPU tensors in Triton's interpreter.

To be imported before any kernel: jit functions are made at import. With TRITON_INTERPRET=1 set from outside, the
interpreter is used on a machine with a GPU too.
"""

from __future__ import annotations

import os
import sys

import torch

DEVICE = (
    torch.device("cuda", torch.cuda.current_device())
    if torch.cuda.is_available() and not os.environ.get("TRITON_INTERPRET")
    else torch.device("cpu")
)
if DEVICE.type == "cpu":
    if "triton" in sys.modules and not os.environ.get("TRITON_INTERPRET"):
        # Its own jit functions were made for a GPU, and kernels that call them would fail one by one.
        raise RuntimeError(
            "triton was imported without TRITON_INTERPRET=1; set it, or import bench.kernels.operators first"
        )
    os.environ["TRITON_INTERPRET"] = "1"
