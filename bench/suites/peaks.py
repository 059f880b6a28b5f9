"""How fast GPUs multiply matrices at most, by NVIDIA's data sheets: bf16, dense, sums in fp32. Pure."""

from __future__ import annotations

import re

# TFLOP/s. The first pattern that fits the driver's name of the GPU counts; what is not here is not known.
_BF16_TFLOPS = (
    (r"\bB200\b", 2250.0),
    (r"\bH200 NVL\b", 835.5),
    (r"\bH200\b", 989.4),
    (r"\bGH200\b", 989.4),
    (r"\bH100 NVL\b", 835.5),
    (r"\bH100 PCIe\b", 756.5),
    (r"\bH100\b", 989.4),
    (r"\bA100\b", 312.0),
    (r"\bA800\b", 312.0),
    (r"\bL40S\b", 362.0),
    (r"\bL4\b", 121.0),
    (r"\bA40\b", 149.7),
    (r"\bA30\b", 165.0),
    (r"\bRTX 4090\b", 165.2),
    (r"\bRTX 3090\b", 71.0),
)


def peak_flops(name: str | None, dtype: str) -> float | None:
    """FLOP/s of a GPU of that name (as the driver gives it) in "bf16"; None where unknown, and for other dtypes.

    fp32 has none: what it may reach depends on whether products run in TF32. Nor has a part of a GPU (MIG).
    """
    if name is None or dtype != "bf16" or "MIG" in name:
        return None
    return next((tflops * 1e12 for pattern, tflops in _BF16_TFLOPS if re.search(pattern, name)), None)


def utilisation(flops: float, seconds: float, ranks: int, peak: float | None) -> float | None:
    """MFU: the share of all ranks' peak that `flops` in `seconds` are; None where the peak is unknown."""
    return None if peak is None else flops / (seconds * ranks * peak)
