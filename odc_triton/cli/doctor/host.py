"""The host: a trial of two ranks, memory, CPUs, and what ranks need to map each other's GPU memory.

The last is torch's symmetric memory, its sockets, and its allocator.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping

from ...machine.topology import Topology
from .findings import NOTE, OK, PROBLEM, Finding, count, size
from .system import Software, System, cgroup_cpus, cgroup_memory, file_system

_GIB = 1 << 30


def check_ranks(system: System) -> Iterator[Finding]:
    error = system.try_ranks()
    if error is None:
        yield Finding(OK, "ranks", "two ranks opened a heap and added to each other's memory")
    else:
        remedy = "allow memfd_create, abstract Unix sockets and, on GPUs, peer access in this container or sandbox"
        yield Finding(PROBLEM, "ranks", f"two ranks can't share a model: {error}", remedy)


def check_shm(system: System) -> Iterator[Finding]:
    space = system.space("/dev/shm")
    if space is None:
        text = "is missing: NCCL and data loader workers need it"
        yield Finding(NOTE, "/dev/shm", text, "mount a tmpfs at /dev/shm")
        return
    whole, free = space
    text = f"{size(free)} free of {size(whole)}"
    if free < _GIB:
        text += "; NCCL and data loader workers use it, shards do not"
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


_SOCKET_PATH_BYTES = 108  # sizeof(sockaddr_un.sun_path), the final zero included
_TMP_VARIABLES = ("TMPDIR", "TMP", "TEMP", "TEMPDIR")  # in torch's order: IpcChannel::get_socket_name
_NETWORK_FILE_SYSTEMS = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "9p", "fuse.sshfs", "afs")


def check_symmetric_memory(software: Software, visible: Topology, environment: Mapping[str, str]) -> Iterator[Finding]:
    if not visible.devices:
        return
    backend = environment.get("TORCH_SYMMMEM")
    settings = sorted(name for name in environment if name.startswith(("TORCH_SYMM_MEM", "TORCH_SYMMMEM")))
    said = f" ({', '.join(f'{name}={environment[name]}' for name in settings)})" if settings else ""
    if software.symmetric_memory_error is not None:
        text = f"can't be imported: {software.symmetric_memory_error}"
        yield Finding(PROBLEM, "symm. memory", text, "install a CUDA build of torch 2.11 to 2.13")
    elif backend not in (None, "CUDA"):
        text = f"TORCH_SYMMMEM={backend}: tested with torch's own CUDA backend only"
        yield Finding(NOTE, "symm. memory", text, "unset TORCH_SYMMMEM")
    else:
        yield Finding(OK, "symm. memory", f"torch has it{said}")


def _folder(environment: Mapping[str, str]) -> tuple[str | None, str]:
    """Where torch puts the sockets, and the variable that sets it."""
    name = next((each for each in _TMP_VARIABLES if each in environment), None)
    return name, "/tmp" if name is None else environment[name]


def check_sockets(visible: Topology, system: System) -> Iterator[Finding]:
    """The folder of the sockets through which torch's symmetric memory passes GPU memory from rank to rank."""
    name, folder = _folder(system.environment)
    said = f"{name}={folder}" if name else folder
    bad = PROBLEM if visible.devices else NOTE
    change = "set TMPDIR to a short local folder, the same on all ranks: TMPDIR=/tmp"
    largest_pid = int((system.read("/proc/sys/kernel/pid_max") or "4194304").strip()) - 1
    over = len(f"{folder}/symm_mem-{largest_pid}".encode()) - _SOCKET_PATH_BYTES + 1
    if over > 0:
        text = f"{said} is {over} bytes too long for the sockets through which ranks exchange GPU memory"
        yield Finding(bad, "TMPDIR", text, change)
        return
    error = system.try_socket(f"{folder}/odc-doctor-{os.getpid()}")
    kind = file_system(system, folder)
    if error is not None:
        text = f"no socket can be made in {said} ({error}); ranks exchange GPU memory through one"
        yield Finding(bad, "TMPDIR", text, change)
    elif kind in _NETWORK_FILE_SYSTEMS:
        yield Finding(NOTE, "TMPDIR", f"{said} is on {kind}: sockets there work on one host only", change)
    else:
        yield Finding(OK, "TMPDIR", f"{said}: writable, short enough for sockets{f', {kind}' * bool(kind)}")


def check_stale_sockets(system: System) -> Iterator[Finding]:
    _, folder = _folder(system.environment)
    left = [each for each in system.names(folder) if re.fullmatch(r"symm_mem-\d+", each)]
    dead = [each for each in left if system.read(f"/proc/{each.split('-')[1]}/stat") is None]
    if dead:
        yield Finding(
            NOTE,
            "TMPDIR",
            f"{count(len(dead), 'socket')} of killed ranks in {folder}: a rank that gets the same process number "
            f"fails with `Failed to bind socket`",
            f"rm {' '.join(f'{folder}/{each}' for each in dead[:2])}{' ...' * (len(dead) > 2)}",
        )


def check_allocator(visible: Topology, environment: Mapping[str, str]) -> Iterator[Finding]:
    if not visible.devices or environment.get("TORCH_SYMMMEM_IMPLICIT_POOL", "1") != "1":
        return
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        value = environment.get(name, "")
        if "expandable_segments:true" in value.lower().replace(" ", ""):
            yield Finding(
                PROBLEM,
                "allocator",
                f"{name}={value}: expandable segments conflict with symmetric memory's pool",
                "unset it, or set TORCH_SYMMMEM_IMPLICIT_POOL=0",
            )
