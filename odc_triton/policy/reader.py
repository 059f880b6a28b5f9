"""Reads the policy of a running job from its ranks' memory, in any process of the same user and host."""

from __future__ import annotations

import contextlib
import itertools
import json
import mmap
import os
import select
import socket
import struct
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from ..base.errors import PolicyUnavailable
from ..checkpoint.adapter import LoraPair, merged
from ..checkpoint.pretrained_tensors import in_files
from ..comm.memory.heap import STATUS_SLOTS
from ..comm.memory.rendezvous import peer_uid
from .offer import MOST_FILES, NUMBER, PIN, UNPIN, hang_up

T = TypeVar("T")
_FREE_READS = 4  # before a reader pins
_SHORTEST_NAP_S, _LONGEST_NAP_S = 100e-6, 5e-3


def read_policy(address: str, *, timeout: float = 60.0) -> PolicyReader:
    """A reader of the model that a running job offers at `address` (`offer_policy`).

        for name, tensor in read_policy(address): ...

    It needs no process group, and no rank takes part.

    address: the offer's `address`.
    timeout: seconds for which it waits for the ranks to publish.

    Raises PolicyUnavailable if no job of this user offers one there.
    """
    return PolicyReader(address, timeout=timeout)


def _is_alone() -> bool:
    """True if no other thread of this process could be the one that trains: it would wait for itself."""
    return all(each is threading.current_thread() or each.daemon for each in threading.enumerate())


class PolicyReader:
    """Iterating gives (name, copy of the tensor) of one version, each time the newest. Names and shapes are those of
    the model's files, or those of its parameters if it is not transformers'.

    It has `version`, the number of the weight update that was read last, 0 before; `config`, the transformers config as
    a dict, or None; and `dtypes`, the names of their dtypes.

    address, timeout: as in `read_policy`.
    """

    def __init__(self, address: str, *, timeout: float = 60.0) -> None:
        self._address, self._timeout_s = address, timeout
        self.version, self._pid = 0, os.getpid()
        self._connection, fds = self._connect()
        try:
            content = json.loads(_mapped(fds[0])[:])
            self._files = [_mapped(fd) for fd in fds[1:]]
        finally:
            for fd in fds:
                os.close(fd)
        self.config: dict[str, Any] | None = content["config"]
        self._units, self._adapted, self._class = content["units"], content["adapted"], content["class"]
        self._adapter = content.get("adapter", {"problem": "its job has an older odc-triton"})
        self.dtypes = {place["dtype"] for unit in self._units for place in unit.values()}
        status = memoryview(self._files[1])[: content["world"] * STATUS_SLOTS * 8].cast("q")
        self._published, self._begun = (status[content[name] :: STATUS_SLOTS] for name in ("published", "stepping"))
        self._close = weakref.finalize(self, self._connection.close)
        self._ended = select.poll()
        self._ended.register(self._connection, select.POLLIN)
        self._pinned = 0  # the number that owners keep for this reader
        self._empty: Any = None

    def _connect(self) -> tuple[socket.socket, list[int]]:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(self._timeout_s)
        try:
            connection.connect(f"\0{self._address.removeprefix('@')}")
            if (uid := peer_uid(connection)) != os.getuid():
                raise PermissionError(f"it is offered by user {uid}, not by this one")
            rank, fds, _, _ = socket.recv_fds(connection, 1, MOST_FILES + 2)
            if not fds:
                raise ConnectionError("it has ended")
            self._rank = rank[0]  # of the job, that this process is, or NO_RANK
            return connection, fds
        except OSError as error:
            connection.close()
            raise PolicyUnavailable(
                f"no policy can be read at {self._address} ({error}): give the address of a job that runs now, as this "
                f"user, on this host"
            ) from None

    def close(self) -> None:
        """Ends the connection. Tensors of a read that is over stay valid."""
        if os.getpid() == self._pid:  # a forked process must not end it
            hang_up(self._connection)
        self._close()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.read(lambda tensors: [(name, value.clone()) for name, value in tensors])

    def read(self, take: Callable[[Iterator[tuple[str, torch.Tensor]]], T]) -> T:
        """Calls `take` on (name, tensor) of one version, which `self.version` is then.

        Tensors are views of the ranks' memory where they can be, read-only: `take` copies what it needs, and is called
        again if a rank published meanwhile. After repeated torn reads the ranks delay the next weight update.

        Returns what `take` returns. Raises PolicyUnavailable if the job ended, or dropped this reader because `take`
        took too long.
        """
        self._require_job()
        reads = itertools.count()
        try:
            while True:
                if next(reads) >= _FREE_READS:
                    self._pin()
                number = self._settled()
                found = take(self._tensors())
                if {*self._begun.tolist()} == {number}:  # no owner has begun another weight update since
                    self.version = number
                    return found
        finally:
            self._unpin()

    def adapter(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """(config, tensors) as in PEFT's files, of one version; the base is not read.

        Raises PolicyUnavailable as `read`, and for a policy that is not LoRA's factors and a frozen base.
        """
        if not (places := self._adapter.get("tensors")):
            problem = self._adapter.get("problem", "it has none")
            raise PolicyUnavailable(f"the policy at {self._address} can't be read as an adapter: {problem}")
        tensors = self.read(lambda _: {name: self._tensor(place).clone() for name, place in places.items()})
        return self._adapter["config"], tensors

    def _settled(self) -> int:
        """Waits until all owners have published equally often and none has begun another; returns how often."""
        start_s = time.monotonic()
        while True:
            begun, published = self._begun.tolist(), self._published.tolist()
            if len({*begun, *published}) == 1:
                return begun[0]
            if 0 < self._pinned < max(begun):  # that rank began before it saw the pin: let the others follow it
                self._pin()
            waited_s = time.monotonic() - start_s
            self._require_job()
            behind = self._rank < len(begun) and begun[self._rank] < max(begun)
            if waited_s > self._timeout_s or (behind and _is_alone()):
                own = f"rank {self._rank} reads its own job's before its own step: step first, or use full_parameters"
                raise PolicyUnavailable(
                    f"the ranks of the policy at {self._address} have published {published} times, and did not all "
                    f"publish equally often within {waited_s:.0f} s: {own if behind else 'does the job stand still?'}"
                )
            time.sleep(min(max(waited_s / 50, _SHORTEST_NAP_S), _LONGEST_NAP_S))

    def _require_job(self) -> None:
        """Raises PolicyUnavailable if the job has ended, or has dropped this reader."""
        if self._connection.fileno() < 0 or self._ended.poll(0):  # it only answers, so this is the end
            self._gone()

    def _gone(self) -> None:
        why = "it ended, or dropped this reader, which held it back for its max_lag" if self._pinned else "it ended"
        raise PolicyUnavailable(f"the job no longer offers its policy at {self._address}: {why}") from None

    def _pin(self) -> None:
        try:
            self._connection.sendall(PIN)
            (self._pinned,) = NUMBER.unpack(self._connection.recv(NUMBER.size))
        except TimeoutError:
            self.close()  # which takes back what the rank may still read
            raise PolicyUnavailable(f"the rank that offers {self._address} does not answer: is it stopped?") from None
        except (OSError, struct.error):  # the latter: nothing came, as it has hung up
            self._gone()

    def _unpin(self) -> None:
        if self._pinned:
            self._pinned = 0
            with contextlib.suppress(OSError):
                self._connection.sendall(UNPIN)

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        if not self._units:
            raise PolicyUnavailable(f"of the policy at {self._address} only its adapter can be read: reader.adapter()")
        if self._class is None or self.config is None:
            yield from ((name, self._value(name, place)) for unit in self._units for name, place in unit.items())
            return
        if self._empty is None:
            self._empty = _empty_model(self._class, self.config)
        yield from in_files(self._empty, self._units, self._value)

    def _value(self, name: str, place: dict[str, Any]) -> torch.Tensor:
        return merged(self._tensor(place), [LoraPair(*each) for each in self._adapted.get(name, ())], self._tensor)

    def _tensor(self, place: dict[str, Any]) -> torch.Tensor:
        dtype, file = getattr(torch, place["dtype"]), self._files[place["file"]]
        flat: list[torch.Tensor] = []
        for offset, count in _joined(place["parts"], dtype.itemsize):
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "The given buffer is not writable")
                flat.append(torch.frombuffer(file, dtype=dtype, count=count, offset=offset))
        whole = flat[0] if len(flat) == 1 else torch.cat([torch.empty(0, dtype=dtype), *flat])
        return whole.view(place["shape"])


def _mapped(fd: int) -> mmap.mmap:
    size = os.fstat(fd).st_size
    return mmap.mmap(fd, size, prot=mmap.PROT_READ) if size else mmap.mmap(-1, 1, prot=mmap.PROT_READ)


def _joined(parts: list[list[int]], itemsize: int) -> list[list[int]]:
    """(first byte, elements) of `parts`, those that follow each other as one."""
    found: list[list[int]] = []
    for offset, count in parts:
        if found and found[-1][0] + found[-1][1] * itemsize == offset:
            found[-1][1] += count
        elif count:
            found.append([offset, count])
    return found


def _empty_model(name: str, config: dict[str, Any]) -> Any:
    import transformers

    cls = getattr(transformers, name, None)
    if cls is None:
        raise PolicyUnavailable(
            f"the policy is a {name}, which transformers {transformers.__version__} does not have: install the job's"
        )
    with torch.device("meta"):
        empty = cls(cls.config_class.from_dict(config))
    empty.tie_weights()
    return empty
