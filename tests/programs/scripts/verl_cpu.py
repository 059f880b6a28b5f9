"""A CPU as a platform of verl, by its own interface: VERL_PLATFORM=cpu VERL_USE_EXTERNAL_MODULES=verl_cpu."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import PlatformRegistry

_NO_MEMORY = {name: lambda: 0 for name in ("memory_allocated", "memory_reserved")}
_DEVICE = SimpleNamespace(**vars(torch.cpu) | _NO_MEMORY | {"mem_get_info": lambda: (0, 0)})


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformCUDA):
    """What verl's FSDP engine asks of a platform when it trains; the rest is CUDA's, and would fail."""

    device_name = "cpu"
    device_module = _DEVICE

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return "cpu"  # verl uses it as a device

    def communication_backend_name(self) -> str:
        return "gloo"
