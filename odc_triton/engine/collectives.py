"""`fully_shard(..., debug=True)`: collectives inside a minibatch are refused."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from .minibatch import Participant

# The namespaces of collectives in `torch.ops`.
_NAMESPACES = ("c10d", "_c10d_functional", "c10d_functional")
_HARMLESS = ("wait_tensor", "_wrap_tensor_autograd")


class RefuseCollectives(TorchDispatchMode):
    """Raises at any collective over more than one rank, as some may never join it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if DTensor in types:  # let DTensor go first: it issues its collectives under this mode
            return NotImplemented
        if func.namespace in _NAMESPACES and func._opname not in _HARMLESS and self._ranks_of(args) != 1:
            raise RuntimeError(
                f"collective {func._opname} inside a minibatch: ranks may run different numbers of microbatches, so "
                f"some would never call it. Reduce metrics after the minibatch instead."
            )
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _ranks_of(args: tuple) -> int | None:
        import torch.distributed as dist

        for argument in reversed(args):  # the group comes last among the strings, after the reduction's name
            if isinstance(argument, str):  # functional collectives name their group
                return dist.distributed_c10d._resolve_process_group(argument).size()  # pyright: ignore  # torch 2.11 has no GroupName
            try:
                return dist.ProcessGroup.unbox(argument).size()
            except (AttributeError, RuntimeError, TypeError):
                continue
        return None


class NoCollectives(Participant):
    """Refuses them between entry and exit."""

    name = "collectives"

    def __init__(self) -> None:
        self._scope = ExitStack()

    def opened(self) -> None:
        self._scope.enter_context(RefuseCollectives())

    def leave(self) -> None:
        self._scope.close()
