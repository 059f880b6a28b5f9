"""Counts the operators at which a host would wait for a GPU, even if everything is on the CPU."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# Operators that read a tensor's elements, or return a tensor whose shape depends on them.
_WAITING = {"_local_scalar_dense", "is_nonzero", "equal", "allclose", "nonzero", "masked_select", "bincount"}
_WAITING |= {"unique_consecutive", "unique_dim", "_unique", "_unique2"}
_BY_MASK = {"index", "index_put", "index_put_", "_index_put_impl_"}
_READING = {"tolist", "numpy", "cpu", "__array__"}  # on a CPU tensor these call no operator
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


class HostWaits:
    """Within `with`: `found` counts "operator at file:line" of what would wait.

    Reading the handles of `model`'s parameters does not count: they are on the host wherever the parameters are.
    """

    def __init__(self, model: nn.Module) -> None:
        self.found: Counter[str] = Counter()
        handles = {p.leaf._odc_handle.data_ptr() for p in model._odc_engine.parameters}
        functions = _Functions(self.found)
        self._modes = functions, _Operators(self.found, handles, functions)

    def __enter__(self) -> HostWaits:
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)


class _Operators(TorchDispatchMode):
    def __init__(self, found: Counter[str], handles: set[int], functions: _Functions) -> None:
        super().__init__()
        self._found, self._handles, self._functions = found, handles, functions

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "odc":  # one of ours, in Python: the functions and operators that it calls count
            with self, self._functions:
                return func.redispatch(_CPU, *args, **kwargs)
        if what := self._waits(func.overloadpacket.__name__, args, kwargs):
            self._found[f"{what} at {_place()}"] += 1
        return func(*args, **kwargs)

    def _waits(self, name: str, args: tuple, kwargs: dict) -> str | None:
        if name in _WAITING and not (name == "_local_scalar_dense" and args[0].data_ptr() in self._handles):
            return name
        if name in _BY_MASK and any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1]):
            return f"{name} by a mask"
        if name == "repeat_interleave" and kwargs.get("output_size") is None:
            return name
        if name in ("_to_copy", "copy_"):
            to = args[0].device if name == "copy_" else kwargs.get("device")
            source = args[1] if name == "copy_" else args[0]
            if to is not None and torch.device(to).type != source.device.type:
                return f"{name} to {to}"
        return None


class _Functions(TorchFunctionMode):
    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name in _READING or (func in (torch.tensor, torch.as_tensor) and kwargs.get("device") is not None):
            self._found[f"{name} at {_place()}"] += 1
        return func(*args, **kwargs)


def _place() -> str:
    """The innermost line that is neither torch's nor this file's, or else the innermost one."""
    inside = str(Path(torch.__file__).parent)
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(inside) and path != __file__ and "/" in path:
            return f"{'/'.join(Path(path).parts[-2:])}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"
