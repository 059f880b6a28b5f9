"""The host: shared memory, memory, CPUs and limits."""

from __future__ import annotations

import os
from collections.abc import Iterator

from .findings import NOTE, OK, PROBLEM, Finding
from .machine import System, cgroup_cpus, cgroup_memory
from .words import count, size

_GIB = 1 << 30


def check_shared_memory(system: System) -> Iterator[Finding]:
    """What shards on CPUs, and the words of ranks on GPUs, are made of."""
    memfd = system.try_memfd()
    if memfd is not None:
        remedy = "allow it in the container's seccomp profile; vm.memfd_noexec < 2"
        yield Finding(PROBLEM, "shared memory", f"memfd_create fails: {memfd}", remedy)
    abstract = system.try_socket(f"\0odc-doctor-{os.getpid()}")
    if abstract is not None:
        remedy = "allow them in the sandbox that this runs in"
        yield Finding(PROBLEM, "shared memory", f"no abstract Unix socket: {abstract}", remedy)
    if memfd is None and abstract is None:
        text = "memfd and abstract sockets work (ranks must share one network namespace)"
        yield Finding(OK, "shared memory", text)


def check_shm(system: System) -> Iterator[Finding]:
    space = system.space("/dev/shm")
    if space is None:
        text = "is not there: NCCL and data loader workers need it"
        yield Finding(NOTE, "/dev/shm", text, "mount a tmpfs at /dev/shm")
        return
    whole, free = space
    text = f"{size(free)} free of {size(whole)}"
    if free < _GIB:
        text += "; shards don't lie there, but NCCL and data loader workers use it"
        remedy = "docker: --shm-size=8g or --ipc=host; Kubernetes: an emptyDir of medium Memory"
        yield Finding(NOTE, "/dev/shm", text, remedy)
    else:
        yield Finding(OK, "/dev/shm", text)


def check_memory(system: System) -> Iterator[Finding]:
    lines = (system.read("/proc/meminfo") or "").splitlines()
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines if len(line.split()) > 1}
    limit, used = cgroup_memory(system)
    free = [kib["MemAvailable"] * 1024] if "MemAvailable" in kib else []
    free += [] if limit is None else [max(limit - used, 0)]
    if not free:
        return
    total = f" of {size(kib['MemTotal'] * 1024)}" if "MemTotal" in kib else ""
    bound = "" if limit is None else f"; this process's cgroup may use {size(limit)}"
    low = min(free) < 2 * _GIB
    yield Finding(
        NOTE if low else OK,
        "memory",
        f"{size(min(free))} available{total}{bound}",
        "raise the container's memory limit, or use a smaller model" if low else None,
    )


def check_cpus(system: System) -> Iterator[Finding]:
    cpus = system.cpus()
    quota = cgroup_cpus(system)
    if quota is not None and quota < cpus:
        text = f"{count(cpus, 'CPU')}, but the container may use {quota:g} of them at a time"
        remedy = f"OMP_NUM_THREADS={max(int(quota), 1)} divided by the ranks of this host"
        yield Finding(NOTE, "CPUs", text, remedy)
    else:
        yield Finding(OK, "CPUs", count(cpus, "CPU"))


def check_locked_memory(system: System) -> Iterator[Finding]:
    limit = system.memlock()
    said = "no limit" if limit is None else f"limit {size(limit)}"
    if limit is not None and limit < _GIB and system.names("/sys/class/infiniband"):
        text = f"{said}: RDMA between hosts registers more than that"
        yield Finding(NOTE, "locked memory", text, "ulimit -l unlimited")
    else:
        yield Finding(OK, "locked memory", f"{said} (of concern to RDMA only)")


def check_ptrace(system: System) -> Iterator[Finding]:
    scope = (system.read("/proc/sys/kernel/yama/ptrace_scope") or "").strip()
    if scope:
        text = f"scope {scope}; no matter: ranks hand over GPU memory through sockets, not by pidfd_getfd"
        yield Finding(OK, "ptrace", text)
