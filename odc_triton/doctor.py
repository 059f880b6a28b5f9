"""What this machine can do, what it can't and why: the report of `odc-triton doctor`, the picture of `odc-triton topo`.

Every question to the system goes through `System`, so that a test can be any machine.
"""

from __future__ import annotations

import importlib
import os
import re
import resource
import socket
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from json import dumps
from typing import Any, Protocol

from .topology import P2P, Device, Pair, PciePath, Topology, read_topology, unusable_pairs, usable_groups

OK, NOTE, PROBLEM = "ok", "note", "problem"
WIDTH = 100

_GIB = 1 << 30
_SOCKET_PATH_BYTES = 108  # sizeof(sockaddr_un.sun_path), the final zero included
_TMP_VARIABLES = ("TMPDIR", "TMP", "TEMP", "TEMPDIR")  # in torch's order: IpcChannel::get_socket_name
_NETWORK_FILE_SYSTEMS = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "9p", "fuse.sshfs", "afs")
_TRITON = ((3, 6), (3, 10))  # from, and below
_TORCH = (2, 11)
_OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}  # by CUDA's major version: NVIDIA, "minor version compatibility"
_OLDEST_GPU = (8, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """Versions, None for what is not installed. `cuda`: of torch's build; `cuda_error`: why it does not start."""

    python: str
    torch: str | None = None
    cuda: str | None = None
    cuda_error: str | None = None
    architectures: tuple[str, ...] = ()
    triton: str | None = None
    triton_pinned: str | None = None
    symmetric_memory_error: str | None = None


class System(Protocol):
    """The questions to the machine. Attempts return what went wrong, None for nothing."""

    environment: Mapping[str, str]

    def software(self) -> Software: ...
    def read(self, path: str) -> str | None: ...
    def names(self, folder: str) -> list[str]: ...
    def space(self, folder: str) -> tuple[int, int] | None:
        """Bytes in all and free, of the file system that it is on."""

    def cpus(self) -> int: ...
    def memlock(self) -> int | None:
        """RLIMIT_MEMLOCK in bytes, None for no limit."""

    def try_memfd(self) -> str | None: ...
    def try_socket(self, address: str) -> str | None:
        """Binds a Unix socket: at a path, or abstract where the address begins with a zero byte."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. Only a problem changes the command's exit status."""

    level: str
    topic: str
    text: str
    remedy: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What `examine` found."""

    topology: Topology
    software: Software
    findings: tuple[Finding, ...]

    @property
    def problems(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.level == PROBLEM)


class ThisMachine:
    """`System` for the machine that this runs on."""

    environment = os.environ

    def software(self) -> Software:
        return _software()

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

    def memlock(self) -> int | None:
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        return None if limit == resource.RLIM_INFINITY else limit

    def try_memfd(self) -> str | None:
        try:
            os.close(os.memfd_create("odc-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        except OSError as error:
            return str(error)
        return None

    def try_socket(self, address: str) -> str | None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
            try:
                end.bind(address)
            except OSError as error:
                return str(error)
        if not address.startswith("\0"):
            os.unlink(address)
        return None


def _software() -> Software:
    python = ".".join(map(str, sys.version_info[:3]))
    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton = None
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError) as error:  # OSError: one of its libraries does not load
        return Software(python=python, triton=triton, cuda_error=str(error))
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
        symmetric_memory_error=symmetric_memory_error,
    )


def examine(system: System | None = None, topology: Topology | None = None) -> Report:
    """Looks at this machine and at what is installed. Starts CUDA where there is a GPU; changes nothing."""
    system = ThisMachine() if system is None else system
    topology = read_topology() if topology is None else topology
    software = system.software()
    checks = (_torch, _triton, _gpus, _lost, _links, _peers, _symmetric_memory, _handles, _stale, _allocator)
    findings = [finding for check in checks for finding in check(system, topology, software)]
    host: tuple[Callable[[System], Iterator[Finding]], ...] = (_cpu_heap, _shm, _memory, _cpus, _memlock, _ptrace)
    findings += [finding for check in host for finding in check(system)]
    return Report(topology=topology, software=software, findings=tuple(findings))


def _torch(system: System, topology: Topology, software: Software) -> Iterator[Finding]:
    if software.torch is None:
        why = f" ({software.cuda_error})" if software.cuda_error else ""
        yield Finding(PROBLEM, "torch", f"can't be imported{why}", "pip install 'torch>=2.11'")
        return
    build = f"torch {software.torch}, {f'CUDA {software.cuda}' if software.cuda else 'built without CUDA'}"
    driver = f"; driver {topology.driver_version} knows CUDA {topology.cuda_version}"
    text = f"{build}{driver if topology.driver_version else ''}; Python {software.python}"
    if _numbers(software.torch) < _TORCH:
        yield Finding(PROBLEM, "torch", f"{text}: too old", "pip install 'torch>=2.11'")
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
        old = needs is not None and have and have[0] < needs
        hidden = system.environment.get("CUDA_VISIBLE_DEVICES")
        yield Finding(
            NOTE if hidden in ("", "-1") else PROBLEM,
            "torch",
            f"{text}: CUDA does not start: {software.cuda_error}",
            f"install driver {needs} or newer, or a torch built for CUDA {topology.cuda_version or 'before'}"
            if old
            else f"CUDA_VISIBLE_DEVICES={hidden!r} hides GPUs: unset it to use them"
            if hidden is not None
            else "see whether nvidia-smi works, and whether the container was started with its GPUs",
        )
    else:
        yield Finding(OK, "torch", text)
        for device in topology.visible().devices:
            if software.architectures and not _has_kernels(device, software.architectures):
                yield Finding(
                    PROBLEM,
                    "torch",
                    f"has no kernels for {device.label}, compute capability {_dotted(device)}",
                    "install a torch whose CUDA knows this GPU",
                )


def _triton(system: System, topology: Topology, software: Software) -> Iterator[Finding]:
    interpreted = system.environment.get("TRITON_INTERPRET") == "1"
    if software.triton is None:
        yield Finding(PROBLEM, "triton", "is not installed", "pip install 'triton>=3.6'")
    elif not _TRITON[0] <= _numbers(software.triton)[:2] < _TRITON[1]:
        text = f"triton {software.triton} is none of 3.6 to 3.9, with which this was tried"
        remedy = f"pip install triton=={software.triton_pinned or '3.7.1'}"
        older = _numbers(software.triton) < _TRITON[0]
        yield Finding(PROBLEM if older else NOTE, "triton", text, remedy)
    elif software.triton_pinned not in (None, software.triton):
        yield Finding(
            NOTE,
            "triton",
            f"triton {software.triton}, but this torch asks for {software.triton_pinned}",
            f"pip install triton=={software.triton_pinned}",
        )
    elif interpreted and topology.visible().devices:
        yield Finding(
            PROBLEM,
            "triton",
            f"triton {software.triton}; TRITON_INTERPRET=1: kernels are interpreted, thousands of times slower",
            "unset TRITON_INTERPRET",
        )
    else:
        yield Finding(OK, "triton", f"triton {software.triton}{' (interpreting)' if interpreted else ''}")


def _gpus(system: System, topology: Topology, software: Software) -> Iterator[Finding]:
    seen = topology.visible().devices
    if topology.missing is not None and seen:
        yield Finding(
            NOTE,
            "GPUs",
            f"{_count(len(seen), 'GPU')} by CUDA's word; links and atomics are unknown: {topology.missing}",
            "pip install nvidia-ml-py; in a container NVIDIA_DRIVER_CAPABILITIES must have `utility`",
        )
    elif not topology.devices:
        on_bus = sum(
            (system.read(f"/sys/bus/pci/devices/{name}/vendor") or "").strip() == "0x10de"
            and (system.read(f"/sys/bus/pci/devices/{name}/class") or "").startswith("0x03")
            for name in system.names("/sys/bus/pci/devices")
        )
        there = f"; {_count(on_bus, 'NVIDIA GPU')} on the PCI bus, out of reach from here" if on_bus else ""
        yield Finding(
            NOTE,
            "GPUs",
            f"none{there}: {topology.missing or 'the driver shows no GPU'}. The CPU backend works without",
            "install the driver, or start the container with its GPUs (`--gpus all`)" if on_bus else None,
        )
    else:
        masked = len(topology.devices) - len(seen)
        some = f", {len(seen)} of {len(topology.devices)} visible to this process" if masked else ""
        names = sorted({device.name for device in topology.devices})
        level, remedy = OK, None
        if not seen:
            level, remedy = NOTE, "unset CUDA_VISIBLE_DEVICES, or install a torch that can use them"
        yield Finding(
            level,
            "GPUs",
            f"{_number_of(topology)} ({', '.join(names)}){some}; topology {topology.key}",
            remedy,
        )
    for device in seen:
        if device.compute_capability is not None and device.compute_capability < _OLDEST_GPU:
            yield Finding(
                PROBLEM,
                "GPUs",
                f"{device.label} ({device.name}) is of compute capability {_dotted(device)}; kernels need 8.0",
                "use Ampere GPUs or newer, or backend='cpu'",
            )


def _lost(system: System, topology: Topology, software: Software) -> Iterator[Finding]:
    for each in topology.lost:
        yield Finding(PROBLEM, "GPUs", f"{each}: it does not answer", "see dmesg for Xid; reset or reboot")


def _links(system: System, topology: Topology, software: Software) -> Iterator[Finding]:
    whole = [device for device in topology.devices if device.parent is None]
    best = max((device.nvlinks for device in whole), default=0)
    for device in whole:
        if best > 0 and device.nvlinks < min(best, device.nvlinks_present):
            yield Finding(
                NOTE,
                "NVLink",
                f"{device.label} has {device.nvlinks} of {device.nvlinks_present} links up, others {best}",
                f"see `nvidia-smi nvlink -s -i {device.index}` and dmesg for Xid 74",
            )
        lanes, most = device.pcie[1], device.pcie_max[1]
        if lanes and most and lanes < most:
            yield Finding(
                NOTE,
                "PCIe",
                f"{device.label} runs on {lanes} of {most} lanes",
                "see whether its card sits right, and in a slot with all lanes",
            )


def _peers(system: System, topology: Topology, software: Software) -> Iterator[Finding]:
    part = topology.visible()
    if len(part.devices) < 2:
        if len(topology.devices) > 1 and unusable_pairs(topology):
            bad = len(unusable_pairs(topology))
            text = f"{bad} of {len(topology.pairs)} pairs of this machine's GPUs can't share a model's shards"
            yield Finding(NOTE, "peers", text, "`odc-triton topo` shows which, and why")
        return
    bad = unusable_pairs(part)
    for reason, remedy in dict.fromkeys((each.reason, each.remedy) for each in bad):
        same = [each.pair for each in bad if each.reason == reason]
        names = ", ".join(f"{pair.one.label}-{pair.other.label}" for pair in same[:4])
        more = f" and {len(same) - 4} more" if len(same) > 4 else ""
        count = f"{len(same)} of {_count(len(part.pairs), 'pair')}"
        yield Finding(PROBLEM, "peers", f"{count}: {reason} ({names}{more})", remedy)
    if bad:
        groups = [group for group in usable_groups(part) if len(group) > 1]
        if groups:
            names = "; ".join(" ".join(device.label for device in group) for group in groups)
            yield Finding(OK, "peers", f"these can share a model's shards: {names}")
        return
    speeds = sorted({round(pair.gbs) for pair in part.pairs if pair.gbs is not None})
    gbs = f", {speeds[0]}{f' to {speeds[-1]}' if len(speeds) > 1 else ''} GB/s per direction" if speeds else ""
    unknown = sum(P2P.UNKNOWN in (pair.read, pair.write, pair.atomics) for pair in part.pairs)
    if unknown:
        text = f"the driver does not say of {unknown} of {_count(len(part.pairs), 'pair')} what they can do"
        yield Finding(NOTE, "peers", text, "python -m bench.gpu_suite tries them")
    else:
        yield Finding(OK, "peers", f"all {len(part.pairs)} pairs: access and native atomics{gbs}")


def _symmetric_memory(system: System, topology: Topology, software: Software) -> Iterator[Finding]:
    if not topology.visible().devices:
        return
    backend = system.environment.get("TORCH_SYMMMEM")
    settings = sorted(name for name in system.environment if name.startswith(("TORCH_SYMM_MEM", "TORCH_SYMMMEM")))
    said = f" ({', '.join(f'{name}={system.environment[name]}' for name in settings)})" if settings else ""
    if software.symmetric_memory_error is not None:
        text, remedy = (
            f"can't be imported: {software.symmetric_memory_error}",
            "install a CUDA build of torch 2.11 to 2.13",
        )
        yield Finding(PROBLEM, "symm. memory", text, remedy)
    elif software.cuda is None or software.cuda_error is not None:
        yield Finding(PROBLEM, "symm. memory", "needs CUDA, which this torch can't use")
    elif backend not in (None, "CUDA"):
        text = f"TORCH_SYMMMEM={backend}: tried with torch's own CUDA backend only"
        yield Finding(NOTE, "symm. memory", text, "unset TORCH_SYMMMEM")
    else:
        yield Finding(OK, "symm. memory", f"torch has it{said}")


def _handles(system: System, topology: Topology, software: Software) -> Iterator[Finding]:
    """The folder through which ranks hand each other GPU memory: sockets of torch's symmetric memory."""
    name = next((each for each in _TMP_VARIABLES if each in system.environment), None)
    folder = "/tmp" if name is None else system.environment[name]
    said = f"{name or 'TMPDIR'}={folder}" if name else folder
    bad = PROBLEM if topology.visible().devices else NOTE
    change = "set TMPDIR to a short local folder, the same on all ranks: TMPDIR=/tmp"
    longest = f"{folder}/symm_mem-{_largest_pid(system)}"
    if len(longest.encode()) >= _SOCKET_PATH_BYTES:
        over = len(longest.encode()) - _SOCKET_PATH_BYTES + 1
        text = f"{said} is {over} bytes too long for the sockets over which ranks exchange GPU memory"
        yield Finding(bad, "TMPDIR", text, change)
        return
    error = system.try_socket(f"{folder}/odc-doctor-{os.getpid()}")
    kind = _file_system(system, folder)
    if error is not None:
        text = f"no socket can be made in {said}, over which ranks exchange GPU memory: {error}"
        yield Finding(bad, "TMPDIR", text, change)
    elif kind in _NETWORK_FILE_SYSTEMS:
        yield Finding(NOTE, "TMPDIR", f"{said} is on {kind}: sockets there are seen by one host", change)
    else:
        yield Finding(OK, "TMPDIR", f"{said}: writable, short enough for sockets{f', {kind}' * bool(kind)}")


def _stale(system: System, topology: Topology, software: Software) -> Iterator[Finding]:
    name = next((each for each in _TMP_VARIABLES if each in system.environment), None)
    folder = "/tmp" if name is None else system.environment[name]
    left = [each for each in system.names(folder) if re.fullmatch(r"symm_mem-\d+", each)]
    dead = [each for each in left if system.read(f"/proc/{each.split('-')[1]}/stat") is None]
    if dead:
        yield Finding(
            NOTE,
            "TMPDIR",
            f"{_count(len(dead), 'socket')} of killed ranks in {folder}: a rank that gets the same process number "
            f"fails with `Failed to bind socket`",
            f"rm {' '.join(f'{folder}/{each}' for each in dead[:2])}{' ...' * (len(dead) > 2)}",
        )


def _allocator(system: System, topology: Topology, software: Software) -> Iterator[Finding]:
    if not topology.visible().devices:
        return
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        value = system.environment.get(name, "")
        expandable = "expandable_segments:true" in value.lower().replace(" ", "")
        if expandable and system.environment.get("TORCH_SYMMMEM_IMPLICIT_POOL", "1") == "1":
            yield Finding(
                PROBLEM,
                "allocator",
                f"{name}={value}: expandable segments conflict with symmetric memory's pool",
                "unset it, or set TORCH_SYMMMEM_IMPLICIT_POOL=0",
            )


def _cpu_heap(system: System) -> Iterator[Finding]:
    """What shards on CPUs, and the words of ranks on GPUs, are made of."""
    memfd = system.try_memfd()
    if memfd is not None:
        text, remedy = (
            f"memfd_create fails: {memfd}",
            "allow it in the container's seccomp profile; vm.memfd_noexec < 2",
        )
        yield Finding(PROBLEM, "shared memory", text, remedy)
    abstract = system.try_socket(f"\0odc-doctor-{os.getpid()}")
    if abstract is not None:
        text, remedy = f"no abstract Unix socket: {abstract}", "allow them in the sandbox that this runs in"
        yield Finding(PROBLEM, "shared memory", text, remedy)
    if memfd is None and abstract is None:
        text = "memfd and abstract sockets work (ranks must share one network namespace)"
        yield Finding(OK, "shared memory", text)


def _shm(system: System) -> Iterator[Finding]:
    space = system.space("/dev/shm")
    if space is None:
        text, remedy = "is not there: NCCL and data loader workers need it", "mount a tmpfs at /dev/shm"
        yield Finding(NOTE, "/dev/shm", text, remedy)
        return
    text = f"{_size(space[1])} free of {_size(space[0])}"
    if space[1] < _GIB:
        more = "docker: --shm-size=8g or --ipc=host; Kubernetes: an emptyDir of medium Memory"
        text += "; shards don't lie there, but NCCL and data loader workers use it"
        yield Finding(NOTE, "/dev/shm", text, more)
    else:
        yield Finding(OK, "/dev/shm", text)


def _memory(system: System) -> Iterator[Finding]:
    lines = (system.read("/proc/meminfo") or "").splitlines()
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines if len(line.split()) > 1}
    limit, used = _cgroup_memory(system)
    free = [kib["MemAvailable"] * 1024] if "MemAvailable" in kib else []
    free += [] if limit is None else [max(limit - used, 0)]
    if not free:
        return
    total = f" of {_size(kib['MemTotal'] * 1024)}" if "MemTotal" in kib else ""
    bound = "" if limit is None else f"; this process's cgroup may use {_size(limit)}"
    low = min(free) < 2 * _GIB
    yield Finding(
        NOTE if low else OK,
        "memory",
        f"{_size(min(free))} available{total}{bound}",
        "raise the container's memory limit, or use a smaller model" if low else None,
    )


def _cpus(system: System) -> Iterator[Finding]:
    count = system.cpus()
    quota = _cgroup_cpus(system)
    if quota is not None and quota < count:
        text = f"{_count(count, 'CPU')}, but the container may use {quota:g} of them at a time"
        remedy = f"OMP_NUM_THREADS={max(int(quota), 1)} divided by the ranks of this host"
        yield Finding(NOTE, "CPUs", text, remedy)
    else:
        yield Finding(OK, "CPUs", _count(count, "CPU"))


def _memlock(system: System) -> Iterator[Finding]:
    limit = system.memlock()
    said = "no limit" if limit is None else f"limit {_size(limit)}"
    if limit is not None and limit < _GIB and system.names("/sys/class/infiniband"):
        text = f"{said}: RDMA between hosts registers more than that"
        yield Finding(NOTE, "locked memory", text, "ulimit -l unlimited")
    else:
        yield Finding(OK, "locked memory", f"{said} (of concern to RDMA only)")


def _ptrace(system: System) -> Iterator[Finding]:
    scope = (system.read("/proc/sys/kernel/yama/ptrace_scope") or "").strip()
    if scope:
        text = f"scope {scope}; no matter: ranks hand over GPU memory through sockets, not by pidfd_getfd"
        yield Finding(OK, "ptrace", text)


def _cgroup_folders(system: System, controller: str) -> list[str]:
    """The folders of this process's cgroup and of those around it, version 2 or 1, innermost first."""
    for line in (system.read("/proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" or controller in controllers.split(","):
            root = "/sys/fs/cgroup" if controllers == "" else f"/sys/fs/cgroup/{controller}"
            parts = [part for part in path.split("/") if part not in ("", "..")]
            return [f"{root}/{'/'.join(parts[:count])}".rstrip("/") for count in range(len(parts), -1, -1)]
    return []


def _cgroup_memory(system: System) -> tuple[int | None, int]:
    """The tightest limit around this process and what is used under it, in bytes."""
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


def _cgroup_cpus(system: System) -> float | None:
    quotas = []
    for folder in _cgroup_folders(system, "cpu"):
        words = (system.read(f"{folder}/cpu.max") or "").split() or [
            (system.read(f"{folder}/cpu.cfs_{each}_us") or "").strip() for each in ("quota", "period")
        ]
        if len(words) == 2 and all(word.isdigit() for word in words):
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def _file_system(system: System, folder: str) -> str | None:
    best, kind = "", None
    for line in (system.read("/proc/mounts") or "").splitlines():
        _, place, this_kind, *_ = line.split()
        inside = folder == place or folder.startswith(place.rstrip("/") + "/")
        if inside and len(place) >= len(best):
            best, kind = place, this_kind
    return kind


def _largest_pid(system: System) -> int:
    return int((system.read("/proc/sys/kernel/pid_max") or "4194304").strip()) - 1


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


def _has_kernels(device: Device, architectures: tuple[str, ...]) -> bool:
    """Machine code runs on the same major version from its minor on, PTX (`compute_`) on all that is newer."""
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


def _dotted(device: Device) -> str:
    return ".".join(map(str, device.compute_capability or ("?",)))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _number_of(topology: Topology) -> str:
    return _count(len(topology.devices), "MIG slice" if any(device.parent for device in topology.devices) else "GPU")


def _size(number: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.3g} {unit}"
        number /= 1024
    return f"{number:.3g} TiB"


def _wrap(text: str, first: str, rest: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)


def render(report: Report) -> str:
    """The findings as a table of at most 100 columns."""
    wide = max(len(finding.topic) for finding in report.findings)
    lines = []
    for finding in report.findings:
        head = f"{finding.level:<7}  {finding.topic:<{wide}}  "
        space = " " * len(head)
        lines += _wrap(finding.text, head, space)
        if finding.remedy:
            lines += _wrap(finding.remedy, f"{space}-> ", f"{space}   ")
    problems, notes = len(report.problems), sum(finding.level == NOTE for finding in report.findings)
    lines += ["", f"{_count(problems, 'problem') if problems else 'No problems'}, {_count(notes, 'note')}."]
    return "\n".join(lines)


def as_json(report: Report) -> dict[str, Any]:
    """The report for programs: problems, findings, versions, devices, and pairs by the devices' UUIDs."""
    topology = report.topology
    return {
        "problems": len(report.problems),
        "findings": [asdict(finding) for finding in report.findings],
        "software": asdict(report.software),
        "topology": {
            "key": topology.key,
            "visible_key": topology.visible().key,
            "driver_version": topology.driver_version,
            "cuda_version": topology.cuda_version,
            "missing": topology.missing,
            "lost": list(topology.lost),
            "devices": [asdict(device) for device in topology.devices],
            "pairs": [_pair_json(pair) for pair in topology.pairs],
        },
    }


def _pair_json(pair: Pair) -> dict[str, Any]:
    return {
        "of": [pair.one.uuid, pair.other.uuid],
        "kind": pair.kind,
        **{name: getattr(pair, name).name for name in ("read", "write", "atomics", "path")},
        **{name: getattr(pair, name) for name in ("nvlinks", "through_switch", "link_gbs", "link_gbs_from", "gbs")},
        "is_usable": not pair.is_unusable,
    }


def draw_matrix(topology: Topology) -> str:
    """What joins each two GPUs, how fast, and whether they can share a model's shards; at most 100 columns."""
    devices = topology.devices
    if not devices:
        return f"{topology.key}: no GPU, {topology.missing or 'the driver shows none'}"
    versions = f", driver {topology.driver_version}, CUDA {topology.cuda_version}" if topology.driver_version else ""
    lines = [f"{topology.key}: {_number_of(topology)}{versions}", ""]
    is_wide = len(devices) <= 8
    label = max(len(device.label) for device in devices)
    wide = max(10 if is_wide else 4, label)
    block = (WIDTH - label - 1) // (wide + 1)
    for start in range(0, len(devices) if len(devices) > 1 else 0, block):
        columns = devices[start : start + block]
        lines.append(" " * label + " " + " ".join(f"{column.label:^{wide}}" for column in columns).rstrip())
        for row in devices:
            cells = (_cell(topology.pair(row, column), is_wide) for column in columns)
            lines.append(f"{row.label:<{label}} " + " ".join(f"{cell:>{wide}}" for cell in cells).rstrip())
        lines.append("")
    if len(devices) > 1:
        lines += [*_legend(topology, is_wide), ""]
    return "\n".join(lines + _device_lines(devices))


def _mark(pair: Pair) -> str:
    if pair.access not in (P2P.OK, P2P.UNKNOWN):
        return "x"
    if pair.atomics not in (P2P.OK, P2P.UNKNOWN):
        return "-"
    return "?" if P2P.UNKNOWN in (pair.read, pair.write, pair.atomics) else "+"


def _cell(pair: Pair | None, is_wide: bool) -> str:
    if pair is None:
        return ".    " if is_wide else "."
    gbs = "" if pair.gbs is None else f"{pair.gbs:.0f}"
    return f"{_joined(pair):<4} {gbs:>3} {_mark(pair)}" if is_wide else f"{gbs}{_mark(pair)}"


def _joined(pair: Pair) -> str:
    if pair.one.parent and pair.one.parent == pair.other.parent:
        return "MIG"
    return f"NV{pair.nvlinks}" if pair.nvlinks else "" if pair.path is PciePath.UNKNOWN else pair.path.name


def _device_lines(devices: tuple[Device, ...]) -> list[str]:
    # GPU numbers are nvidia-smi's; those of CUDA depend on masks and on CUDA_DEVICE_ORDER.
    rows = [("", "CUDA", "name", "cc", "memory", "PCIe", "NUMA", "CPUs", "PCI bus")]
    for device in devices:
        generation, lanes = device.pcie_max
        rows.append(
            (
                device.label,
                "masked" if device.cuda_index is None else f"cuda:{device.cuda_index}",
                textwrap.shorten(device.name.removeprefix("NVIDIA "), 28, placeholder="..."),
                _dotted(device),
                _size(device.memory_bytes) if device.memory_bytes else "?",
                f"gen{generation} x{lanes}" if generation and lanes else "?",
                device.numa_nodes or "?",
                textwrap.shorten((device.cpus or "?").replace(",", ", "), 15, placeholder="...").replace(", ", ","),
                (device.bus_id or "?").removeprefix("0000"),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(f"{cell:<{wide}}" for cell, wide in zip(row, widths, strict=True)).rstrip() for row in rows]


_MARKS = {
    "+": "can share a model's shards: access and native atomics",
    "-": "access, but no native atomics",
    "x": "no access",
    "?": "unknown",
}
_ROUTES = {
    PciePath.SELF: "on one board",
    PciePath.PIX: "through one PCIe switch",
    PciePath.PXB: "through several PCIe switches",
    PciePath.PHB: "through one host bridge",
    PciePath.NODE: "through the host bridges of one NUMA node",
    PciePath.SYS: "from socket to socket",
}


def _legend(topology: Topology, is_wide: bool) -> list[str]:
    lines = ["Numbers are GB/s per direction."]
    linked = [pair for pair in topology.pairs if pair.nvlinks]
    if linked and is_wide:
        through = sorted({"through NVSwitch" if pair.through_switch else "direct" for pair in linked})
        rates = sorted({(pair.link_gbs, pair.link_gbs_from) for pair in linked if pair.link_gbs is not None})
        by = {"driver": "the driver says", "table": "a table says; the driver does not"}
        each = "; ".join(f"{gbs:g} each at line rate, {by[said or 'driver']}" for gbs, said in rates)
        lines.append(f"  NV#   so many NVLinks, {' or '.join(through)}" + f" ({each})" * bool(each))
    if is_wide:
        paths = sorted(
            {pair.path for pair in topology.pairs if not pair.nvlinks and _joined(pair) in PciePath.__members__}
        )
        lines += [f"  {path.name:<4}  {_ROUTES[path]}" for path in paths if path in _ROUTES]
    bad = unusable_pairs(topology)
    for mark, words in _MARKS.items():
        if mark not in {_mark(pair) for pair in topology.pairs}:
            continue
        lines.append(f"  {mark}     {words}" + (f": {topology.missing}" if mark == "?" and topology.missing else ""))
        for reason, remedy in dict.fromkeys((each.reason, each.remedy) for each in bad if _mark(each.pair) == mark):
            lines += _wrap(reason, " " * 8, " " * 8)
            lines += _wrap(remedy, " " * 8 + "-> ", " " * 11)
    return lines


def main(json: bool = False, examine: Callable[[], Report] = examine) -> int:
    """Prints the report; 1 if there is a problem."""
    report = examine()
    print(dumps(as_json(report), indent=2) if json else render(report))
    return 1 if report.problems else 0
