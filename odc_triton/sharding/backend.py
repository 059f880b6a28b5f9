"""Differences between a CPU and a GPU: the heap's memory, the order of work, the addition of gradients."""

from __future__ import annotations

import contextlib
import platform
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from odc_kernels.batch_copy import BatchCopy, torchs_batch_copy
from odc_kernels.streams import CudaDevice

from ..comm.layout import EXACT, MemoryLayout, ParameterSpec
from ..comm.memory.cuda import CudaHeap
from ..comm.memory.heap import SharedMemoryHeap, SymmetricHeap
from ..engine.transport import DeviceStreams, KernelTransport, LockedTransport, Streams, Transport
from ..machine.topology import Place


class Backend(ABC):
    """One kind of device: its shared memory and the order of its work. `name`: as given to `fully_shard`."""

    name: str
    mesh_device: str = "cpu"
    apart: bool
    """Whether each rank's shards are in its own memory and whole tensors are gathered. Else whole tensors are views."""
    adds_by_kernel = False
    gathers_by_kernel = False
    """Whether one kernel gathers a unit's small parameters. Triton's interpreter is too slow for every unit."""

    def batch_copy(self) -> BatchCopy | None:
        """A function that makes all copies of a stream in one call; None if each is a call of its own."""
        return None

    def device_id(self) -> str | None:
        """Names this rank's device, where it matters whether two ranks share one."""
        return None

    def device_index(self) -> int | None:
        """The device's number in this rank's process."""
        return None

    def check(self, specs: list[ParameterSpec]) -> None:
        """Raises for parameters that this backend can't hold: kernels sum gradients in fp32 only."""
        for spec in specs if self.adds_by_kernel else ():
            if spec.reduce_dtype not in (None, "float32", EXACT):
                raise NotImplementedError(
                    f"{spec.name} would sum its gradient in {spec.reduce_dtype}: kernels sum in float32. Leave "
                    f"reduce_dtype out, and convert float64 models before fully_shard."
                )

    def unusable_peers(self, devices: list[str | None]) -> str | None:
        """Why the ranks' devices, by `device_id`, can't share memory, with the remedy; None if no reason is known."""
        return None

    def place(self, devices: list[str | None]) -> Place:
        """The key of operators' measurements for these ranks, by `device_id`."""
        return Place(backend=self.name, processor=processor_name(), topology="cpu", ranks=len(devices))

    @abstractmethod
    def streams(self) -> Streams: ...

    @abstractmethod
    def open_heap(self, plan: MemoryLayout, mesh: DeviceMesh, *, shared: bool, **how: Any) -> SymmetricHeap:
        """Collective. `mesh`: one-dimensional; `shared`: whether ranks share a device, or number their devices alike;
        `how`: the heap's `token`, a name that only its ranks know, `timeout_s` and `look`.
        """

    def transport(self, heap: Any, streams: Streams, timeout_s: float) -> Transport:
        return KernelTransport(heap, streams) if self.adds_by_kernel else LockedTransport(heap, streams, timeout_s)


class CpuBackend(Backend):
    """One shared mapping; whole tensors are views, gradients are added under locks."""

    name = "cpu"
    apart = False
    heap: type[SharedMemoryHeap] = SharedMemoryHeap

    def streams(self) -> Streams:
        return Streams()

    def open_heap(self, plan: MemoryLayout, mesh: DeviceMesh, *, shared: bool, **how: Any) -> SymmetricHeap:
        return self.heap(
            rank=mesh.get_local_rank(),
            world=mesh.size(),
            size_bytes=plan.size_bytes,
            locks=len(plan.parameters),
            **how,
        )


class CudaBackend(Backend):
    """torch's symmetric memory; the copy engine gathers units ahead, the scatter kernel adds gradients."""

    name = "cuda"
    mesh_device = "cuda"
    apart = True
    adds_by_kernel = gathers_by_kernel = True

    def batch_copy(self) -> BatchCopy | None:
        return torchs_batch_copy()

    def device_id(self) -> str | None:
        return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)

    def device_index(self) -> int | None:
        return torch.cuda.current_device()

    def unusable_peers(self, devices: list[str | None]) -> str | None:
        from ..machine.probe import read_topology
        from ..machine.unusable import refuse_unusable

        try:
            refuse_unusable(read_topology(), devices)
        except RuntimeError as error:
            return str(error)
        return None

    def place(self, devices: list[str | None]) -> Place:
        from ..machine.probe import read_topology

        topology = read_topology().only(devices).key
        name = torch.cuda.get_device_name()
        return Place(backend=self.name, processor=name, topology=topology, ranks=len(devices))

    def streams(self) -> Streams:
        return DeviceStreams(CudaDevice(torch.device("cuda", torch.cuda.current_device())))

    def open_heap(self, plan: MemoryLayout, mesh: DeviceMesh, *, shared: bool, **how: Any) -> SymmetricHeap:
        return CudaHeap(
            rank=mesh.get_local_rank(),
            world=mesh.size(),
            size_bytes=plan.size_bytes,
            group=mesh.get_group(),
            shared_device=shared,
            **how,
        )


BACKENDS: dict[str, type[Backend]] = {each.name: each for each in (CpuBackend, CudaBackend)}


def processor_name() -> str:
    """The CPU's name according to Linux, else its architecture."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.machine()


def backend_of(name: str, mesh: DeviceMesh | None) -> Backend:
    """The backend of that name; "auto": the mesh's, or without a mesh CUDA's if there is a GPU, else the CPU's.

    Raises ValueError for an unknown name, RuntimeError for "cuda" without a GPU.
    """
    if name == "auto":
        kind = mesh.device_type if mesh is not None else "cuda" if torch.cuda.is_available() else "cpu"
        if kind not in ("cpu", "cuda"):
            raise NotImplementedError(f"mesh is on {kind!r}; parameters can be sharded on 'cpu' and 'cuda'")
        name = kind
    if name not in BACKENDS:
        raise ValueError(f"backend is {name!r}; it must be 'auto' or one of {', '.join(map(repr, BACKENDS))}")
    if name == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("backend='cuda', but torch sees no GPU; give backend='cpu' or a CUDA build of torch")
    return BACKENDS[name]()
