"""`offload_checkpoints`: what activation checkpointing keeps waits for its backward in the host's memory.

Checkpointing keeps the input of each layer. Hooks of saved tensors copy it to a buffer of the host while the layer
computes, and back while the layer after it runs backward. Both ways take one stream, so a buffer that is free can be
filled at once. On a GPU buffers are pinned. On the CPU they are a mapping of their own, which the kernel counts as
shared memory (Pss_Shmem), not as the process's anonymous one.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..base.untyped import untyped
from ..engine.api import engine_of
from ..engine.minibatch import Participant
from ..engine.module import plain_class
from ..engine.transport import Streams


def offload_checkpoints(model: nn.Module) -> None:
    """Moves what checkpointed layers keep between forward and backward to the host, and back one layer ahead.

        model.gradient_checkpointing_enable({"use_reentrant": False})
        model = fully_shard(model)
        offload_checkpoints(model)

    Results are the same, bit by bit. Two layers' inputs stay on the device. Host memory: one microbatch's inputs of all
    layers, kept until the model goes.

    Raises TypeError for a model that is not sharded, ValueError if none of its layers is checkpointed, or if it was
    called before.
    """
    engine = engine_of(model, "offload_checkpoints")
    if not any(map(_is_checkpointed, model.modules())):
        raise ValueError(
            f"no layer of {plain_class(model).__name__} is checkpointed: call model.gradient_checkpointing_enable("
            f'{{"use_reentrant": False}}) before offload_checkpoints'
        )
    if engine.participant(OffloadedCheckpoints) is not None:
        raise ValueError("offload_checkpoints was called on this model before")
    own = engine.streams.first.another()
    engine.streams.also(own)
    offloaded = OffloadedCheckpoints(own)
    engine.register(offloaded)

    def wrap(*_: object) -> None:
        for layer in map(untyped, filter(_is_checkpointed, model.modules())):
            if not isinstance(layer._gradient_checkpointing_func, _Offloading):
                layer._gradient_checkpointing_func = _Offloading(layer._gradient_checkpointing_func, offloaded)

    model.register_forward_pre_hook(wrap)  # each time: Trainer calls gradient_checkpointing_enable again


def _is_checkpointed(module: nn.Module) -> bool:
    """True for a layer of transformers whose calls are checkpointed. The models around them have the attributes too."""
    if not getattr(module, "gradient_checkpointing", False) or not hasattr(module, "_gradient_checkpointing_func"):
        return False
    return not any(hasattr(each, "_gradient_checkpointing_func") for each in module.modules() if each is not module)


class OffloadedCheckpoints(Participant):
    """`sent_bytes`: what went to the host in this minibatch; `host_bytes`: of the buffers."""

    name = "offload"

    def __init__(self, streams: Streams) -> None:
        self.sent_bytes = self.host_bytes = 0
        self._streams = streams
        self._free: list[torch.Tensor] = []
        self._last: Callable[[], _Kept | None] = lambda: None

    def opened(self) -> None:
        self.sent_bytes = 0

    def keep(self, x: torch.Tensor) -> _Kept:
        """Begins the copy of x to the host."""
        kept = _Kept(self._streams, x, self._buffer(x.nbytes), before=self._last)
        weakref.finalize(kept, self._free.append, kept.buffer)  # also if its backward never comes
        self._last = weakref.ref(kept)
        self.sent_bytes += x.nbytes
        return kept

    def _buffer(self, size_bytes: int) -> torch.Tensor:
        """The smallest free one that is large enough, else a new one in place of the largest."""
        self._free.sort(key=len)
        for at, buffer in enumerate(self._free):
            if len(buffer) >= size_bytes:
                return self._free.pop(at)
        if self._free:
            self.host_bytes -= len(self._free.pop())
        pinned = self._streams.device is not None and torch.cuda.is_available()
        if pinned:  # torch takes so much in any case
            size_bytes = 1 << (size_bytes - 1).bit_length()
        self.host_bytes += size_bytes
        if pinned:
            return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
        return _mapped(size_bytes)


def _mapped(size_bytes: int) -> torch.Tensor:
    """uint8 [size_bytes] in memory without a name, which ends with the tensor. Raises OSError if there is none left."""
    fd = os.memfd_create("odc-checkpoints", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, size_bytes)
        return torch.frombuffer(mmap.mmap(fd, size_bytes), dtype=torch.uint8)
    except OSError as error:
        raise OSError(
            error.errno,
            f"{error.strerror}: {size_bytes / 1e9:.2f} GB of host memory for one layer's checkpoint; give packs fewer "
            f"tokens, or leave offload_checkpoints out",
        ) from None
    finally:
        os.close(fd)


class _Kept:
    """A saved tensor in `buffer`, and on the device again from `fetch` until `take`. `before`: what was kept before."""

    def __init__(
        self, streams: Streams, x: torch.Tensor, buffer: torch.Tensor, *, before: Callable[[], _Kept | None]
    ) -> None:
        self._streams, self._before, self.buffer = streams, before, buffer
        self._shape, self._dtype, self._device = x.shape, x.dtype, x.device
        self._host = buffer[: x.nbytes].view(x.dtype).view(x.shape)
        self._there: torch.Tensor | None = None
        streams.add(x.detach(), lambda x: self._host.copy_(x, non_blocking=True), most_bytes=x.nbytes)

    @torch.no_grad()
    def fetch(self) -> None:
        """Begins the copy to the device."""
        if self._there is None:
            place: Any = torch.empty(0, dtype=self._dtype, device=self._device)  # torch's stub of `set_` wants strides
            self._streams.allocate(place.untyped_storage(), self._host.nbytes)
            there = self._there = place.set_(place.untyped_storage(), 0, self._shape)
            host = self._host
            self._streams.add(there, lambda x: x.copy_(host, non_blocking=True), most_bytes=host.nbytes)

    def take(self) -> torch.Tensor:
        """The tensor, for the current stream; the one before it is on its way."""
        self.fetch()
        self._streams.follow_adds()
        there, self._there = self._there, None
        assert there is not None, "`fetch` has made it"
        if (before := self._before()) is not None:
            before.fetch()
        return there


class _Offloading:
    """A layer's checkpoint function, `run`, whose saved input goes to the host."""

    def __init__(self, run: Callable[..., Any], offloaded: OffloadedCheckpoints) -> None:
        self._run, self._offloaded = run, offloaded

    def __call__(self, function: Callable[..., Any], *given: Any, **named: Any) -> Any:
        if not given:  # checkpointing keeps what has a name itself, not through hooks
            return self._run(function, **named)
        hidden = given[0]
        its = hidden.data_ptr(), hidden.shape  # not the tensor: torch keeps the hooks as long as the graph

        def pack(x: torch.Tensor) -> Any:
            return self._offloaded.keep(x) if (x.data_ptr(), x.shape) == its else x

        def unpack(kept: Any) -> torch.Tensor:
            return kept.take() if isinstance(kept, _Kept) else kept

        # Checkpointing's own hooks are inside: these see what it saves itself.
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return self._run(function, *given, **named)
