"""The questions that the doctor asks a machine, and this machine's answers."""

from __future__ import annotations

import importlib
import os
import re
import socket
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """Versions, None for what is not installed. `cuda`: the one that torch was built with.

    `cuda_error`: why CUDA does not start, or, if `torch` is None, why torch does not.
    """

    python: str
    torch: str | None = None
    cuda: str | None = None
    cuda_error: str | None = None
    architectures: tuple[str, ...] = ()
    triton: str | None = None
    triton_pinned: str | None = None
    transformers: str | None = None
    symmetric_memory_error: str | None = None


class System(Protocol):
    """A machine to ask. Attempts return what went wrong, None if nothing did."""

    environment: Mapping[str, str]

    def software(self) -> Software: ...
    def read(self, path: str) -> str | None: ...
    def names(self, folder: str) -> list[str]: ...
    def space(self, folder: str) -> tuple[int, int] | None:
        """Total and free bytes of the file system that the folder is on."""

    def cpus(self) -> int: ...
    def try_ranks(self) -> str | None:
        """Two ranks open a heap and add to each other's memory: on GPUs if there are two, else on the CPU."""

    def try_socket(self, path: str) -> str | None:
        """Binds a Unix socket."""


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


class ThisMachine:
    """`System` for this machine."""

    environment = os.environ

    def software(self) -> Software:
        python = ".".join(map(str, sys.version_info[:3]))
        triton, transformers = _version("triton"), _version("transformers")
        try:
            torch = importlib.import_module("torch")
        except (ImportError, OSError) as error:  # OSError: one of torch's libraries does not load
            return Software(python=python, triton=triton, transformers=transformers, cuda_error=str(error))
        pins = [re.match(r"triton *\(?== *([0-9.]+)", line) for line in metadata.requires("torch") or ()]
        cuda_error = symmetric_memory_error = None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            works = torch.cuda.is_available()
            if torch.version.cuda is not None and not works:
                cuda_error = str(caught[-1].message).split("(Triggered")[0].strip() if caught else "torch sees no GPU"
            try:
                importlib.import_module("torch.distributed._symmetric_memory")
            except (ImportError, OSError, AttributeError) as error:
                symmetric_memory_error = str(error)
        return Software(
            python=python,
            torch=torch.__version__,
            cuda=torch.version.cuda,
            cuda_error=cuda_error,
            architectures=tuple(torch.cuda.get_arch_list()) if works else (),
            triton=triton,
            triton_pinned=next((pin.group(1) for pin in pins if pin), None),
            transformers=transformers,
            symmetric_memory_error=symmetric_memory_error,
        )

    def read(self, path: str) -> str | None:
        try:
            with open(path) as file:
                return file.read()
        except (OSError, UnicodeDecodeError):
            return None

    def names(self, folder: str) -> list[str]:
        try:
            return sorted(os.listdir(folder))
        except OSError:
            return []

    def space(self, folder: str) -> tuple[int, int] | None:
        try:
            found = os.statvfs(folder)
        except OSError:
            return None
        return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize

    def cpus(self) -> int:
        return len(os.sched_getaffinity(0))

    def try_ranks(self) -> str | None:
        from ...comm.launch import launch
        from .trial import add_to_each_other

        try:
            launch(add_to_each_other, ranks=2)
        except (RuntimeError, OSError) as error:
            return str(error)
        return None

    def try_socket(self, path: str) -> str | None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
            try:
                end.bind(path)
            except OSError as error:
                return str(error)
        os.unlink(path)
        return None


def _cgroup_folders(system: System, controller: str) -> list[str]:
    """The folders of this process's cgroup and of its parents, version 2 or 1, innermost first."""
    for line in (system.read("/proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" or controller in controllers.split(","):
            root = "/sys/fs/cgroup" if controllers == "" else f"/sys/fs/cgroup/{controller}"
            parts = [part for part in path.split("/") if part not in ("", "..")]
            return [f"{root}/{'/'.join(parts[:count])}".rstrip("/") for count in range(len(parts), -1, -1)]
    return []


def cgroup_memory(system: System) -> tuple[int | None, int]:
    """The tightest limit on this process and what is used under it, in bytes."""
    tightest: tuple[int | None, int] = (None, 0)
    for folder in _cgroup_folders(system, "memory"):
        for limit_name, used_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            text = (system.read(f"{folder}/{limit_name}") or "").strip()
            limit = int(text) if text.isdigit() else 1 << 60
            if limit < 1 << 60 and (tightest[0] is None or limit < tightest[0]):
                used = (system.read(f"{folder}/{used_name}") or "0").strip()
                tightest = limit, int(used)
    return tightest


def cgroup_cpus(system: System) -> float | None:
    """How many CPUs this process may use at a time, None for no limit."""
    quotas = []
    for folder in _cgroup_folders(system, "cpu"):
        words = (system.read(f"{folder}/cpu.max") or "").split() or [
            (system.read(f"{folder}/cpu.cfs_{each}_us") or "").strip() for each in ("quota", "period")
        ]
        if len(words) == 2 and all(word.isdigit() for word in words):
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def file_system(system: System, folder: str) -> str | None:
    """The type of file system that the folder is on."""
    best, kind = "", None
    for line in (system.read("/proc/mounts") or "").splitlines():
        _, place, this_kind, *_ = line.split()
        inside = folder == place or folder.startswith(place.rstrip("/") + "/")
        if inside and len(place) >= len(best):
            best, kind = place, this_kind
    return kind
