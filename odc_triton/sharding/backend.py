"""What differs between a CPU and a GPU: where the heap lies, in which order work is done, how gradients are added."""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from odc_kernels.streams import CudaDevice

from ..comm.layout import ParameterSpec, Plan
from ..comm.memory import ApartHeap, CudaHeap, SharedMemoryHeap, SymmetricHeap
from ..engine.gradients import Accumulator, KernelAccumulator, LockedAccumulator
from ..engine.simulated_device import SimulatedDevice
from ..engine.streams import DeviceStreams, Streams
from ..nn.tuned import Place


class CpuBackend:
    """One shared mapping; whole tensors are views, gradients are added under locks."""

    name = "cpu"
    mesh_device = "cpu"
    apart = False
    adds_by_kernel = False
    gathers_by_kernel = False
    """Whether one kernel gathers a unit's small parameters. Triton's interpreter takes too long for every unit."""

    def device_id(self) -> str | None:
        """Names this rank's device, where two ranks on one are worth a thought."""
        return None

    def device_index(self) -> int | None:
        """The number that this rank's process knows that device by."""
        return None

    def check(self, specs: list[ParameterSpec]) -> None:
        """Raises for parameters that this backend can't hold."""

    def unusable_peers(self, devices: list[str | None]) -> str | None:
        """Why the ranks' devices, by `device_id`, can't share memory, with the remedy; None where nothing is known."""
        return None

    def place(self, devices: list[str | None]) -> Place:
        """Where these ranks run, by `device_id`: what measurements of operators hold for."""
        return Place(backend=self.name, processor=processor_name(), topology="cpu", ranks=len(devices))

    def streams(self) -> Streams:
        return Streams()

    def open_heap(self, plan: Plan, mesh: DeviceMesh, *, token: str, timeout_s: float, shared: bool) -> SymmetricHeap:
        """Collective. `mesh`: one-dimensional; `token`: a name that only its ranks know; `shared`: whether ranks have
        one device in common, or number theirs alike.
        """
        return self._open(SharedMemoryHeap, plan, mesh, token, timeout_s)

    def _open(self, heap: type[Any], plan: Plan, mesh: DeviceMesh, token: str, timeout_s: float) -> SymmetricHeap:
        return heap(
            rank=mesh.get_local_rank(),
            world=mesh.size(),
            size_bytes=plan.size_bytes,
            slots=len(plan.parameters),
            token=token,
            timeout_s=timeout_s,
        )

    def accumulator(self, heap: Any, streams: Streams, timeout_s: float) -> Accumulator:
        return KernelAccumulator(streams) if self.adds_by_kernel else LockedAccumulator(heap, streams, timeout_s)


class ApartBackend(CpuBackend):
    """CUDA's ways on the CPU: shards apart, whole tensors gathered and freed, streams that are as late as they may.

    With ODC_SIMULATED_STREAMS=early they do everything at once: see engine/simulated_device.py.
    """

    name = "cpu-apart"
    apart = True

    def streams(self) -> Streams:
        return DeviceStreams(SimulatedDevice(os.environ.get("ODC_SIMULATED_STREAMS", "late")))

    def open_heap(self, plan: Plan, mesh: DeviceMesh, *, token: str, timeout_s: float, shared: bool) -> SymmetricHeap:
        return self._open(ApartHeap, plan, mesh, token, timeout_s)


class InterpreterBackend(ApartBackend):
    """The same, and gradients are added by the scatter kernel, which Triton's interpreter runs."""

    name = "cpu-interpreter"
    adds_by_kernel = True

    def check(self, specs: list[ParameterSpec]) -> None:
        if os.environ.get("TRITON_INTERPRET") != "1":
            raise RuntimeError(f"backend={self.name!r}: set TRITON_INTERPRET=1 before triton is imported")
        _only_fp32_sums(specs)


class CudaBackend(CpuBackend):
    """torch's symmetric memory; units are gathered ahead by the copy engine, gradients leave by the scatter kernel."""

    name = "cuda"
    mesh_device = "cuda"
    apart = True
    adds_by_kernel = gathers_by_kernel = True

    def device_id(self) -> str | None:
        return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)

    def device_index(self) -> int | None:
        return torch.cuda.current_device()

    def check(self, specs: list[ParameterSpec]) -> None:
        _only_fp32_sums(specs)

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

    def open_heap(self, plan: Plan, mesh: DeviceMesh, *, token: str, timeout_s: float, shared: bool) -> SymmetricHeap:
        return CudaHeap(
            rank=mesh.get_local_rank(),
            world=mesh.size(),
            size_bytes=plan.size_bytes,
            token=token,
            timeout_s=timeout_s,
            group=mesh.get_group(),
            shared_device=shared,
        )


BACKENDS = {each.name: each for each in (CpuBackend, ApartBackend, InterpreterBackend, CudaBackend)}


def processor_name() -> str:
    """The CPU's name as Linux has it, else its architecture's."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.machine()


def _only_fp32_sums(specs: list[ParameterSpec]) -> None:
    for spec in specs:
        if spec.reduce_dtype not in (None, "float32"):
            raise NotImplementedError(
                f"{spec.name} would sum its gradient in {spec.reduce_dtype}: kernels sum in float32. Leave "
                f"reduce_dtype out, and convert float64 models before fully_shard."
            )


def backend_of(name: str, mesh: DeviceMesh | None) -> CpuBackend:
    """The backend of that name; for "auto" by the mesh, without one CUDA where there is a GPU.

    Raises ValueError for an unknown name, RuntimeError where there is no GPU.
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
