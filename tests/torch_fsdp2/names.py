"""What torch's tests are given instead of their own names: ranks as processes, a CPU, the `fully_shard` to test."""

from __future__ import annotations

import functools
import unittest
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.testing._internal.common_distributed import run_subtests
from torch.testing._internal.common_utils import TestCase

import odc_triton
from odc_triton.engine.module import ODCModule

RANKS = 2  # what the tests take for the number of GPUs


class Rank(TestCase):
    """A test on one of several ranks. `compared` counts the assertions that held."""

    rank, compared = -1, 0
    run_subtests = run_subtests
    world_size = RANKS

    @property
    def process_group(self) -> dist.ProcessGroup:
        return dist.distributed_c10d._get_default_group()


def _counting(original: Callable) -> Callable:
    @functools.wraps(original)
    def compare(self: Rank, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        self.compared += 1
        return result

    return compare


for _name in dir(TestCase):
    if _name.startswith("assert"):
        setattr(Rank, _name, _counting(getattr(TestCase, _name)))


def names(way: str) -> dict[str, Any]:
    """`way`: torch's own FSDP2 ("torch"), the own engine ("ours"), or torch's with `use_odc` ("bridge")."""
    library = odc_triton if way == "ours" else fsdp
    sharded = ODCModule if way == "ours" else fsdp.FSDPModule

    def roots(models: tuple[Any, ...]) -> list[nn.Module]:
        """The sharded modules that are in no other one."""
        found, inside = [], set()
        for module in (m for model in models if isinstance(model, nn.Module) for m in model.modules()):
            if way != "torch" and isinstance(module, sharded) and module not in inside:
                found.append(module)
                inside.update(module.modules())
        return found

    def ready(model: nn.Module) -> None:
        has_values = not any(parameter.is_meta for parameter in model.parameters())
        if way == "bridge" and has_values and not hasattr(model, "_odc_engine"):
            odc_triton.use_odc(model)

    def begin(*models: Any) -> None:
        for model in roots(models):
            ready(model)
            if not model._odc_engine.is_open:
                odc_triton.begin_minibatch(model)

    def end(*models: Any) -> None:
        for model in roots(models):
            odc_triton.end_minibatch(model)

    return {
        "fully_shard": library.fully_shard,
        "register_fsdp_forward_method": library.register_fsdp_forward_method,
        "MixedPrecisionPolicy": fsdp.MixedPrecisionPolicy,
        "FSDPModule": sharded,
        "ready": ready,
        "begin": begin,
        "end": end,
        "FSDPTest": Rank,
        "FSDPTestMultiThread": Rank,
        "all_reduce_average": lambda tensor: (dist.all_reduce(tensor), tensor.div_(dist.get_world_size())),
        "skip_if_lt_x_gpu": lambda count: unittest.skipIf(count > RANKS, f"needs {count} ranks"),
        "requires_nccl_version": lambda *_: lambda test: test,
        "test_compiled_fsdp": lambda **_: lambda test: test,  # not compiled
        "TEST_CUDA": True,
        "get_cycles_per_ms": lambda: 0,
        "cuda": SimpleNamespace(
            device_count=lambda: RANKS,
            current_device=lambda: 0,
            _sleep=lambda cycles: None,
            Stream=torch.cpu.Stream,
            current_stream=torch.cpu.current_stream,
        ),
    }
