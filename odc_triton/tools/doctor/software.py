"""Checks that the versions of torch, its CUDA, the driver and triton work together."""

from __future__ import annotations

import importlib
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ...base.environment import installed
from ...machine.topology import Topology
from .findings import NOTE, OK, PROBLEM, Finding

_OLDEST = {"torch": (2, 11), "triton": (3, 6)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """Versions, None if not installed. `cuda`: the one that torch was built with.

    `cuda_error`: why CUDA does not start, or, if `torch` is None, why torch can't be imported.
    """

    python: str
    torch: str | None = None
    cuda: str | None = None
    cuda_error: str | None = None
    triton: str | None = None


def installed_software() -> Software:
    """Imports torch, and starts CUDA if torch was built with it."""
    python, triton = ".".join(map(str, sys.version_info[:3])), installed("triton")["triton"]
    found = {"python": python, "triton": None if triton == "not installed" else triton}
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError) as error:  # OSError: one of torch's libraries does not load
        return Software(cuda_error=str(error), **found)
    cuda_error = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if torch.version.cuda is not None and not torch.cuda.is_available():
            cuda_error = str(caught[-1].message).split("(Triggered")[0].strip() if caught else "torch sees no GPU"
    return Software(torch=torch.__version__, cuda=torch.version.cuda, cuda_error=cuda_error, **found)


def check_torch(software: Software, topology: Topology, environment: Mapping[str, str]) -> Iterator[Finding]:
    install = "pip install 'torch>=2.11'"
    if software.torch is None:
        why = f" ({software.cuda_error})" if software.cuda_error else ""
        yield Finding(PROBLEM, "torch", f"can't be imported{why}", install)
        return
    build = f"torch {software.torch}, {f'CUDA {software.cuda}' if software.cuda else 'built without CUDA'}"
    driver = f"; driver {topology.driver_version} supports CUDA {topology.cuda_version}"
    text = f"{build}{driver if topology.driver_version else ''}; Python {software.python}"
    if _is_too_old("torch", software.torch):
        yield Finding(PROBLEM, "torch", f"{text}: too old", install)
    elif topology.devices and software.cuda is None:
        text = f"{text}: it can't use this machine's GPUs"
        yield Finding(PROBLEM, "torch", text, "install a CUDA build of torch (pytorch.org/get-started)")
    elif topology.devices and software.cuda_error is not None:
        hidden = environment.get("CUDA_VISIBLE_DEVICES")
        remedy = (
            "check that nvidia-smi works, that the driver is new enough for this torch's CUDA, and that the container "
            "was started with its GPUs"
        )
        if hidden is not None:
            remedy = f"CUDA_VISIBLE_DEVICES={hidden!r} hides GPUs: unset it to use them"
        level = NOTE if hidden in ("", "-1") else PROBLEM
        yield Finding(level, "torch", f"{text}: CUDA does not start: {software.cuda_error}", remedy)
    else:
        yield Finding(OK, "torch", text)


def check_triton(software: Software, visible: Topology, environment: Mapping[str, str]) -> Iterator[Finding]:
    interpreted = environment.get("TRITON_INTERPRET") == "1"
    text = f"triton {software.triton}"
    if software.triton is None:
        yield Finding(PROBLEM, "triton", "is not installed", "pip install 'triton>=3.6'")
    elif _is_too_old("triton", software.triton):
        yield Finding(PROBLEM, "triton", f"{text}: too old", "pip install 'triton>=3.6'")
    elif interpreted and visible.devices:
        text = f"{text}; TRITON_INTERPRET=1: kernels are interpreted, thousands of times slower"
        yield Finding(PROBLEM, "triton", text, "unset TRITON_INTERPRET")
    else:
        yield Finding(OK, "triton", f"{text}{' (interpreting)' if interpreted else ''}")


def _is_too_old(name: str, version: str) -> bool:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < _OLDEST[name]
