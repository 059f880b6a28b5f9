"""Has Triton's interpreter run the kernels. To be imported before any kernel: jit functions are made at import."""

import os

os.environ["TRITON_INTERPRET"] = "1"
