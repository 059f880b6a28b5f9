"""Offers a sharded model to processes outside of the job, which read it from the ranks' shared memory.

[Note: one version] Each owner shows two numbers: of the last weight update that it began, and of the last that it
finished. Before a read all numbers of all owners must be equal; if after it no owner has begun another, none wrote
meanwhile. Owners do not wait for readers. But a reader that was interrupted several times may pin the current version:
rank 0 shows its number, and owners begin no later one until the reader has finished, died, or used up `max_lag`.

[Note: the socket] Over an abstract Unix socket rank 0's thread passes open files to readers of the same user: what is
where, as JSON, and the heaps, read-only; with a byte that says which rank the reader itself is, or NO_RANK. A reader
keeps its connection, whose end tells each side that the other died. It sends PIN, and gets the pinned number, or UNPIN.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ..checkpoint.adapter import Origin, lora_factors, origins_of, peft_layers
from ..checkpoint.pretrained import transformers_part
from ..checkpoint.pretrained_tensors import PretrainedTensors
from ..comm.layout import aligned
from ..comm.memory.heap import SharedMemoryHeap
from ..comm.memory.rendezvous import listen, peer_of, peer_uid
from ..engine.api import engine_of

log = logging.getLogger("odc_triton")

PIN, UNPIN = b"p", b"u"
NUMBER = struct.Struct("q")
NO_RANK = 255
MOST_FILES = 250  # in one message over a Unix socket
_LOOK_S, _PINNED_LOOK_S = 0.5, 0.02


class PolicyOffer:
    """What `offer_policy` returns. Its `address`, for `read_policy`, is the same on all ranks."""

    def __init__(self, address: str, server: _OfferServer | None, model: nn.Module) -> None:
        self.address, self._server, self._model, self._adapters = address, server, model, _adapters(model)
        self._publication = engine_of(model).publication
        self._publication.check = self._check

    def _check(self) -> None:
        """Raises RuntimeError if the model's adapters compute otherwise than readers read them."""
        if _adapters(self._model) != self._adapters:
            raise RuntimeError(
                "the model's adapters are active, merged, disabled or scaled otherwise than when offer_policy was "
                "called, and readers would not see that: close() the offer and make another, or set them back"
            )

    def close(self) -> None:
        """Ends the offer, and readers' connections. Raises RuntimeError in a process forked from the rank's."""
        engine_of(self._model).refuse_in_child("PolicyOffer.close")
        if self._publication.check == self._check:
            self._publication.check = lambda: None
        if self._server is not None:
            self._server.close()
            self._server = None


def offer_policy(model: nn.Module, *, max_lag: float = 30.0) -> PolicyOffer:
    """Lets other processes of this user and host read `model` at any time, by `read_policy(offer.address)`.

    Collective, after `fully_shard` and after weights are loaded; it ends with `close()` or the process. Buffers and
    parameters that are not sharded are offered as they are now.

    Each optimizer's step is a version; a `ChainedOptimizer`'s step is one version. The model's adapters stay as
    they are: a step, or `publish`, after another one was activated, merged, disabled or scaled raises RuntimeError.

    model: what `fully_shard` returned.
    max_lag: how long a reader may delay the next weight update after repeated torn reads, in seconds; a reader that
        takes longer is dropped, with a warning.

    Returns the offer, whose `address` readers need. Raises TypeError for a model that is not sharded, ValueError for
    another `max_lag`; on all ranks NotImplementedError on GPUs and for a model that can't be offered, RuntimeError if
    rank 0 failed otherwise.
    """
    engine = engine_of(model, "offer_policy")
    if not 0 <= max_lag < engine.barrier.timeout_s:
        raise ValueError(
            f"max_lag is {max_lag}: give seconds, at least 0 and less than {engine.barrier.timeout_s:g}, fully_shard's "
            f"timeout, as ranks wait for one whose weight update is delayed"
        )
    if engine.heap.device.type != "cpu":
        raise NotImplementedError(
            f"the model is on {engine.heap.device.type}, and a policy can be read by other processes only from the CPU "
            f"backend's memory so far: sample with the model itself or with vLLM in the ranks' processes"
        )
    engine.refuse_borrowed("offer_policy", "offer the base, and give readers adapters by save_pretrained")
    engine.publication.max_lag_s = max_lag
    server, failure = None, None
    pids = [theirs["pid"] for theirs in engine.exchange("offer the policy", {"pid": os.getpid()})]
    message: dict[str, Any] = {"address": None}
    if engine.rank == 0:
        own = {"pids": pids[: min(engine.heap.world, NO_RANK)], "max_lag_s": max_lag}
        try:
            server = _OfferServer(engine.publication, files=_Contents(model).files(), **own)
            message["address"] = server.address
        except Exception as error:  # raised below, once the other ranks know it
            failure, message["problem"] = error, str(error)
            message["is_supported"] = not isinstance(error, NotImplementedError)
    message = engine.exchange("offer the policy", message)[0]
    if "problem" in message:
        raise (RuntimeError if message["is_supported"] else NotImplementedError)(message["problem"]) from failure
    return PolicyOffer(message["address"], server, model)


def _adapters(model: nn.Module) -> list[Any]:
    """What PEFT's layers compute with."""
    names = ("active_adapters", "merged_adapters", "disable_adapters", "scaling")
    layers = (each for each in model.modules() if isinstance(each, peft_layers()))
    return [copy.deepcopy([getattr(each, name, None) for name in names]) for each in layers]


class _Contents:
    """What is where: the names of a model's files, and bytes of the heaps."""

    def __init__(self, model: nn.Module) -> None:
        self._engine = engine_of(model)
        self._model = model
        assert isinstance(self._engine.heap, SharedMemoryHeap), "a policy on GPUs is not offered"
        self._heaps = [self._engine.heap]
        self._apart: list[torch.Tensor] = []  # not in a heap: they are copied into a file of their own
        self._apart_bytes = 0
        # The model may be whole, by `unshard()`.
        self._parameters = {id(p): each for each in self._engine.parameters for p in (each.sharded, each.leaf)}

    def files(self) -> list[int]:
        """What is where, as JSON; the tensors that are in no heap; the heaps."""
        try:
            peft, factors = lora_factors(self._model)
            adapter = {"config": peft, "tensors": {name: self._place(each) for name, each in factors.items()}}
        except (NotImplementedError, ValueError) as error:
            adapter = {"problem": str(error)}
        try:
            transformers_part(self._model)
        except TypeError:  # no transformers model: its parameters' names
            units = [{each.name: Origin(each.sharded) for each in self._engine.parameters}]
            units[0] |= {name: each for name, each in origins_of(self._model) if id(each.value) not in self._parameters}
            kind, config = None, None
        else:
            weights = PretrainedTensors(self._model)
            units, kind, config = weights.units, type(weights.empty).__name__, weights.empty.config.to_dict()
        publication = self._engine.publication
        origins = {name: origin for unit in units for name, origin in unit.items()}
        theirs = [name for name, each in origins.items() if each.layer is not None or each.packed is not None]
        if theirs and adapter.get("tensors"):
            units, origins = [], {}
        elif theirs:
            raise NotImplementedError(
                f"{theirs[0]} is merged by PEFT's code or quantised, so other processes can't read it, nor the adapter "
                f"alone ({adapter.get('problem', 'there is none')}): sample with the model itself or with vLLM in the "
                f"ranks' processes"
            )
        content = {
            "adapter": adapter,
            "units": [{name: self._place(origin.value) for name, origin in unit.items()} for unit in units],
            "adapted": {name: [*map(self._pair, each.pairs)] for name, each in origins.items() if each.pairs},
            "class": kind,
            "config": config,
            "world": self._engine.heap.world,
            "published": publication.published.slot,
            "stepping": publication.stepping.slot,
        }
        if len(self._heaps) >= MOST_FILES:
            raise NotImplementedError(
                f"the model was sharded by {len(self._heaps)} calls of fully_shard, and a policy of at most "
                f"{MOST_FILES - 1} can be offered: shard its blocks with the model, by one call"
            )
        text = json.dumps(content, default=lambda each: sorted(each) if isinstance(each, set) else str(each)).encode()
        apart = _file([bytes(each.contiguous().view(-1).view(torch.uint8).numpy()) for each in self._apart])
        return [_file([text]), apart, *(heap.read_only_fd for heap in self._heaps)]

    def _pair(self, pair: Any) -> list[Any]:
        a, b = map(self._place, (pair.a, pair.b))
        return [a, b, pair.scaling, pair.is_transposed]

    def _place(self, value: torch.Tensor) -> dict[str, Any]:
        """Its dtype, shape, file, and (first byte, elements) of its parts in it."""
        if (parameter := self._parameters.get(id(value))) is None:
            file, parts = 0, [(self._apart_bytes, value.numel())]
            self._apart.append(value.detach().cpu())
            self._apart_bytes += aligned(value.nbytes)
            dtype, shape = str(value.dtype).removeprefix("torch."), value.shape
        else:
            shard, heap = parameter.shard, parameter.shard.heap
            assert isinstance(heap, SharedMemoryHeap), "as the first"
            if not any(heap is each for each in self._heaps):
                self._heaps.append(heap)
            file = 1 + [heap is each for each in self._heaps].index(True)
            parts = [(heap.offset_of(each), each.numel()) for each in shard.compute_shards if each.numel()]
            dtype, shape = shard.spec.compute_dtype, shard.spec.whole_shape
        return {"dtype": dtype, "shape": list(shape), "file": file, "parts": parts}


def _file(contents: Iterable[bytes]) -> int:
    """An anonymous file of these, each at the next aligned byte; open for reading."""
    fd = os.memfd_create("odc-policy", os.MFD_CLOEXEC)
    offset = 0
    try:
        for content in contents:
            left = memoryview(content)
            while left:  # one call writes 2 GiB at most
                written = os.pwrite(fd, left, offset)
                left, offset = left[written:], offset + written
            offset = aligned(offset)
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    finally:
        os.close(fd)


def hang_up(end: socket.socket) -> None:
    """Ends a connection, or takes no more, also if a forked process, as a data loader's worker, still has it."""
    with contextlib.suppress(OSError):  # the other end has done so
        end.shutdown(socket.SHUT_RDWR)
    end.close()


class _OfferServer:
    """Rank 0's thread: see the notes above. `files`: what each reader gets; the first two are this object's own.
    `pids`: of the ranks whose memory is offered.
    """

    def __init__(self, publication: Any, *, files: list[int], pids: list[int], max_lag_s: float) -> None:
        self._publication, self._files, self._pids, self._max_lag_s = publication, files, pids, max_lag_s
        name = f"odc-policy-{secrets.token_hex(8)}"
        self.address = f"@{name}"
        self._listener = listen(name, backlog=64)
        self._listener.setblocking(False)
        self._pins: dict[socket.socket, tuple[int, float]] = {}  # (number, when it was pinned) by reader
        self._readers: set[socket.socket] = set()
        self._is_closing = False
        self._thread = threading.Thread(target=self._serve, name="odc-policy", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_closing = True
        self._thread.join()
        for each in [*self._readers, self._listener]:
            hang_up(each)
        for fd in self._files[:2]:
            os.close(fd)
        self._publication.pinned.show(0)

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while not self._is_closing:
                for key, _ in selector.select(_PINNED_LOOK_S if self._pins else _LOOK_S):
                    if key.fileobj is self._listener:
                        self._accept(selector)
                    elif isinstance(key.fileobj, socket.socket) and not self._answer(key.fileobj):
                        self._drop(key.fileobj, selector)
                for reader, (number, since_s) in [*self._pins.items()]:
                    if time.monotonic() - since_s > self._max_lag_s and self._begun() > number:
                        (pid, _), lag_s = peer_of(reader), self._max_lag_s
                        log.warning("reader %d held the policy back for %g s (max_lag): it is dropped", pid, lag_s)
                        self._drop(reader, selector)

    def _accept(self, selector: selectors.BaseSelector) -> None:
        with contextlib.suppress(OSError):  # the reader is gone
            reader, _ = self._listener.accept()
            if peer_uid(reader) != os.getuid():
                reader.close()
                return
            reader.setblocking(False)
            self._readers.add(reader)
            selector.register(reader, selectors.EVENT_READ)
            pid, _ = peer_of(reader)
            rank = self._pids.index(pid) if pid in self._pids else NO_RANK
            socket.send_fds(reader, [bytes([rank])], self._files)

    def _answer(self, reader: socket.socket) -> bool:
        """Answers one request; False if the reader has left."""
        try:
            request = reader.recv(1)
            if request == PIN:
                number = self._begun()
                self._pins[reader] = number, time.monotonic()
                self._show()
                reader.send(NUMBER.pack(number))
            elif request == UNPIN:
                self._pins.pop(reader, None)
                self._show()
        except OSError:
            return False
        return request in (PIN, UNPIN)

    def _begun(self) -> int:
        """The last weight update that an owner has begun."""
        return max(self._publication.stepping.seen())

    def _show(self) -> None:
        self._publication.pinned.show(min((number for number, _ in self._pins.values()), default=0))

    def _drop(self, reader: socket.socket, selector: selectors.BaseSelector) -> None:
        selector.unregister(reader)
        hang_up(reader)
        self._readers.discard(reader)
        if self._pins.pop(reader, None) is not None:
            self._show()
