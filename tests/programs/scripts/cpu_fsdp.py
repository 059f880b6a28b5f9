"""accelerate uses FSDP on GPUs only: here a CPU's ranks pass for GPUs'. cpu_fsdp.py [-m] PROGRAM ARGS runs it."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DistributedType


def pass_for_gpus() -> None:
    init, build_device_mesh = PartialState.__init__, ParallelismConfig.build_device_mesh

    def __init__(self: PartialState, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    PartialState.__init__ = __init__
    ParallelismConfig.build_device_mesh = lambda self, device: build_device_mesh(self, "cpu")


if __name__ == "__main__":
    pass_for_gpus()
    del sys.argv[0]
    if sys.argv[0] == "-m":
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(sys.argv[0]).parent))
        runpy.run_path(sys.argv[0], run_name="__main__")
