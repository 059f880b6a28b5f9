"""The kernel packages that run recurrent layers where they are installed, called for documents end to end.

    q, k [1, T, heads, K]    v, out [1, T, value heads, V]    states of a delta rule [documents, value heads, K, V]
    x, out [1, T, heads, P]  B, C [1, T, groups, N]           states of a scan [documents, heads, P, N]
    x, out [1, channels, T]

States are fp32, no document is empty."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from packaging.version import Version
from torch import Tensor, nn

# By module: the distribution, its first version that can be used, what those before do, what its function must take.
_NEEDED = {
    "fla": ("flash-linear-attention", "0.5.0", "reads wrong keys where value heads share them", "cu_seqlens_cpu"),
    "mamba_ssm": ("mamba-ssm", "2.2.3", "computes wrong gradients where heads are in groups", "seq_idx"),
    "causal_conv1d": ("causal-conv1d", "1.1.0", "does not keep documents apart", "seq_idx"),
}


class PackageUnsupported(ValueError):
    """A package's function would mix documents, or its states or gradients are others than transformers'."""


class Kernel(NamedTuple):
    function: Callable[..., Any]
    package: str  # with its version: "flash-linear-attention 0.5.2"
    torch: Callable[..., Any]  # transformers' own


class Function(NamedTuple):
    """Of a modeling module. `kernel`: what it calls if that is a package's."""

    plain: Callable[..., Any]
    kernel: Kernel | None

    def on(self, device: torch.device) -> Callable[..., Any]:
        """What computes it there; transformers would call the package's wherever it is installed."""
        if self.kernel is None:
            return self.plain
        return self.kernel.function if device.type == "cuda" else self.kernel.torch


def kernel_of(function: Callable[..., Any]) -> Kernel | None:
    """What a modeling module's recurrent function calls, as transformers decided at its import; None is plain torch."""
    if isinstance(function, nn.Module):  # where `kernels` is installed, each of these functions is one
        forward = function.forward.__func__  # type: ignore[attr-defined]
        if forward is not type(function).forward:
            raise PackageUnsupported(f"the Hub's `{forward.__module__}` replaced it: load without `use_kernels=True`")
        function = inspect.getclosurevars(forward).nonlocals["func"]
    wrapped = inspect.getclosurevars(function).nonlocals
    function = wrapped.get("implementation", function)
    module = function.__module__.partition(".")[0]
    if function is wrapped.get("torch_function") or module == "transformers":
        return None
    if module not in _NEEDED:
        raise PackageUnsupported(f"`{function.__module__}.{function.__name__}`, which is unknown, replaced it")
    name, since, reason, takes = _NEEDED[module]
    package = f"{name} {getattr(sys.modules[module], '__version__', '0')}"
    defaults = {key: parameter.default for key, parameter in inspect.signature(function).parameters.items()}
    if Version(package.split()[1]) >= Version(since):
        reason = f"has no `{takes}` in `{function.__name__}`" if takes not in defaults else ""
        if defaults.get("state_v_first") or defaults.get("transpose_state_layout"):
            reason = "lays states out as [V, K], not [K, V]"
    if reason:
        raise PackageUnsupported(f"{package} {reason}: install {name}>={since}, or uninstall it to use plain torch")
    return Kernel(function, package, wrapped["torch_function"])


@dataclass(frozen=True, kw_only=True)
class Documents:
    """Where documents begin and end, [0, ..., T] in int32; never written into, as fla keeps what it computed of it."""

    ends: Tensor
    on_host: Tensor  # the same, so that no layer waits for the device

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device | str) -> Documents:
        on_host = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
        pinned = on_host.pin_memory() if torch.device(device).type == "cuda" else on_host
        return cls(ends=pinned.to(device, non_blocking=True), on_host=on_host)

    def lengths(self) -> list[int]:
        return self.on_host.diff().tolist()

    def numbers(self) -> Tensor | None:
        """The number of each token's document, int32 [1, T]; None if there is one."""
        lengths = self.ends.diff()
        numbers = torch.arange(len(lengths), dtype=torch.int32, device=lengths.device)
        return numbers.repeat_interleave(lengths, output_size=int(self.on_host[-1]))[None] if len(lengths) > 1 else None


def delta_rule(kernel: Kernel, *rows: Tensor, documents: Documents, states: Tensor | None, final: bool, **terms: Any):
    """fla's gated delta rule or KDA of (query, key, value, g, beta): (output, states at documents' ends if `final`)."""
    states = None if states is None else states.float()  # KDA takes no other
    bounds = {"cu_seqlens": documents.ends, "cu_seqlens_cpu": documents.on_host}
    return kernel.function(*rows, initial_state=states, output_final_state=final, **bounds, **terms)


def scan(kernel: Kernel, *rows: Tensor, documents: Documents, states: Tensor | None, final: bool, **terms: Any):
    """mamba-ssm's scan of (x, dt, A, B, C): one call, or, with states, one for each document.

    A call takes one initial state for a row of the batch, and the final states of documents have no gradients.
    """
    if states is None and not final:
        return kernel.function(*rows, seq_idx=documents.numbers(), **terms), None
    x, dt, A, B, C = rows
    starts = [None] * len(documents.lengths()) if states is None else states.split(1)
    parts = zip(*(row.split(documents.lengths(), 1) for row in (x, dt, B, C)), starts, strict=True)
    terms["return_final_states"] = True
    calls = [kernel.function(x, dt, A, B, C, initial_states=start, **terms) for x, dt, B, C, start in parts]
    return torch.cat([out for out, _ in calls], 1), torch.cat([last for _, last in calls]) if final else None


def convolve(kernel: Kernel, x: Tensor, documents: Documents, **terms: Any) -> Tensor:
    """causal-conv1d's convolution of whole documents, whose numbers need channels side by side in memory."""
    return kernel.function(x[0].T.contiguous().T[None], seq_idx=documents.numbers(), **terms)
