"""Whether the versions of torch, its CUDA, the driver and triton work together."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from ...machine.topology import Device, Topology
from .findings import NOTE, OK, PROBLEM, Finding, dotted
from .system import Software

_OLDEST_TORCH = (2, 11)
_TRITON = ((3, 6), (3, 10))  # from, and below
# Versions that the tests have run with: constraints*.txt, and README's table.
TESTED = {
    "python": ((3, 10), (3, 11), (3, 12), (3, 13)),
    "torch": ((2, 11), (2, 13), (2, 15)),
    "triton": ((3, 6), (3, 7), (3, 9)),
    "transformers": ((5, 17), (5, 23)),
}
_INSTALL_TORCH = "pip install 'torch>=2.11'"
_OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}  # by CUDA's major version: NVIDIA, "minor version compatibility"


def check_torch(software: Software, topology: Topology, environment: Mapping[str, str]) -> Iterator[Finding]:
    if software.torch is None:
        why = f" ({software.cuda_error})" if software.cuda_error else ""
        yield Finding(PROBLEM, "torch", f"can't be imported{why}", _INSTALL_TORCH)
        return
    build = f"torch {software.torch}, {f'CUDA {software.cuda}' if software.cuda else 'built without CUDA'}"
    driver = f"; driver {topology.driver_version} supports CUDA {topology.cuda_version}"
    text = f"{build}{driver if topology.driver_version else ''}; Python {software.python}"
    if _numbers(software.torch) < _OLDEST_TORCH:
        yield Finding(PROBLEM, "torch", f"{text}: too old", _INSTALL_TORCH)
    elif not topology.devices:
        yield Finding(OK, "torch", text)
    elif software.cuda is None:
        yield Finding(
            PROBLEM,
            "torch",
            f"{text}: it can't use this machine's GPUs",
            "install a CUDA build of torch (pytorch.org/get-started)",
        )
    elif software.cuda_error is not None:
        needs = _OLDEST_DRIVER.get(_numbers(software.cuda)[0])
        have = _numbers(topology.driver_version or "")
        hidden = environment.get("CUDA_VISIBLE_DEVICES")
        if needs is not None and have and have[0] < needs:
            older = topology.cuda_version or "before"
            remedy = f"install driver {needs} or newer, or a torch built for CUDA {older}"
        elif hidden is not None:
            remedy = f"CUDA_VISIBLE_DEVICES={hidden!r} hides GPUs: unset it to use them"
        else:
            remedy = "check that nvidia-smi works, and that the container was started with its GPUs"
        level = NOTE if hidden in ("", "-1") else PROBLEM
        yield Finding(level, "torch", f"{text}: CUDA does not start: {software.cuda_error}", remedy)
    else:
        yield Finding(OK, "torch", text)
        for device in topology.visible().devices:
            if software.architectures and not _has_kernels(device, software.architectures):
                yield Finding(
                    PROBLEM,
                    "torch",
                    f"has no kernels for {device.label}, compute capability {dotted(device.compute_capability)}",
                    "install a torch whose CUDA supports this GPU",
                )


def check_triton(software: Software, visible: Topology, environment: Mapping[str, str]) -> Iterator[Finding]:
    interpreted = environment.get("TRITON_INTERPRET") == "1"
    if software.triton is None:
        yield Finding(PROBLEM, "triton", "is not installed", "pip install 'triton>=3.6'")
    elif not _TRITON[0] <= _numbers(software.triton)[:2] < _TRITON[1]:
        text = f"triton {software.triton} is not one of the tested versions, 3.6 to 3.9"
        remedy = f"pip install triton=={software.triton_pinned or '3.7.1'}"
        older = _numbers(software.triton) < _TRITON[0]
        yield Finding(PROBLEM if older else NOTE, "triton", text, remedy)
    elif software.triton_pinned not in (None, software.triton):
        yield Finding(
            NOTE,
            "triton",
            f"triton {software.triton}, but this torch requires {software.triton_pinned}",
            f"pip install triton=={software.triton_pinned}",
        )
    elif interpreted and visible.devices:
        yield Finding(
            PROBLEM,
            "triton",
            f"triton {software.triton}; TRITON_INTERPRET=1: kernels are interpreted, thousands of times slower",
            "unset TRITON_INTERPRET",
        )
    else:
        yield Finding(OK, "triton", f"triton {software.triton}{' (interpreting)' if interpreted else ''}")


def check_tested(software: Software) -> Iterator[Finding]:
    """Names the versions that no test has run with, except those that the checks above complain about."""
    untested = []
    for name, tested in TESTED.items():
        version = getattr(software, name)
        if version is None or (minor := _numbers(version)[:2]) in tested:
            continue
        said = {"torch": minor < _OLDEST_TORCH, "triton": not _TRITON[0] <= minor < _TRITON[1]}
        if not said.get(name):
            untested.append(f"{name} {version} (tested: {', '.join(map(dotted, tested))})")
    if untested:
        yield Finding(
            NOTE, "versions", f"untested: {', '.join(untested)}", "run `make test` with them, or use tested ones"
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


def _has_kernels(device: Device, architectures: tuple[str, ...]) -> bool:
    """Machine code runs on the same major version from its minor on, PTX (`compute_`) on anything newer."""
    if device.compute_capability is None:
        return True
    major, minor = device.compute_capability
    for each in architectures:
        kind, _, digits = each.partition("_")
        number = int(re.sub(r"\D", "", digits) or 0)
        own = number // 10 == major and number % 10 <= minor
        if own or (kind == "compute" and number <= 10 * major + minor):
            return True
    return False
