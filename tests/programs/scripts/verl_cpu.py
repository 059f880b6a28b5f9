"""A CPU as a platform of verl, by its own interface: VERL_PLATFORM=cpu VERL_USE_EXTERNAL_MODULES=verl_cpu."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import PlatformRegistry

_NONE = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved", "empty_cache")
_DEVICE = vars(torch.cpu) | {
    **{name: lambda: 0 for name in _NONE},
    "mem_get_info": lambda: (0, 0),
    "get_device_name": lambda: "CPU",
    "get_rng_state": torch.get_rng_state,
    "set_rng_state": torch.set_rng_state,
}

_init_process_group = dist.init_process_group


def _of_one_backend(backend: str | None = None, **options: Any) -> None:
    """verl names the CPU's backend and the device's, which torch refuses for one device."""
    _init_process_group("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, **options)


dist.init_process_group = _of_one_backend


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformCUDA):
    """What verl asks of a platform when it trains by FSDP; the rest is CUDA's, and would fail."""

    device_name = "cpu"
    device_module = SimpleNamespace(**_DEVICE)

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return "cpu"  # verl uses it as a device

    def communication_backend_name(self) -> str:
        return "gloo"
