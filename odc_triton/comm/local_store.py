"""The store of the ranks that our launcher starts: through it they synchronise and find each other's memory.

torch's TCPStore trusts anyone who reaches its port, so any user of the host. This one is a thread of the launcher and
an abstract Unix socket, and both ends check who owns the other's process. A FileStore would not do: its file grows
with every barrier, and a rank that is stopped or killed while writing to it blocks all others forever.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist

from .memory.rendezvous import STORE, listen, peer_uid

_SLACK_S = 10.0  # for the answer that a key is late
_LONGEST_S = 1e6  # poll(2) can wait this long


class StoreServer:
    """Serves the socket `name` until it is closed. Each connection has a thread, as one may wait or be stopped."""

    def __init__(self, name: str) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._is_closed = False
        self._listener = listen(name, backlog=128)
        self._accepts = threading.Thread(target=self._accept, daemon=True)
        self._accepts.start()

    def _accept(self) -> None:
        while not self._is_closed:
            with contextlib.suppress(OSError):  # the socket is closed, or no more files can be opened
                connection, _ = self._listener.accept()
                with connection:
                    if peer_uid(connection) == os.getuid():
                        served = Connection(connection.detach())
                        threading.Thread(target=self._serve, args=(served,), daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        with connection, contextlib.suppress(EOFError, OSError):
            while not self._is_closed:
                question, *given = connection.recv()
                with self._changed:
                    answer = getattr(self, f"_{question}")(*given)
                connection.send(answer)

    def _set(self, key: str, value: bytes) -> None:
        self._values[key] = value
        self._changed.notify_all()

    def _get(self, keys: list[str], timeout_s: float) -> list[bytes] | None:
        self._changed.wait_for(lambda: self._is_closed or self._check(keys), timeout_s)
        return [self._values[key] for key in keys] if self._check(keys) else None

    def _check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def _add(self, key: str, amount: int) -> int:
        number = int(self._values.get(key, 0)) + amount
        self._set(key, str(number).encode())
        return number

    def _compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """As TCPStore's: returns the key's value afterwards, or `expected` if it has none."""
        if self._values.get(key, b"") == expected:
            self._set(key, desired)
        return self._values.get(key, expected)

    def _delete_key(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread, which would keep the name
        self._accepts.join()
        self._listener.close()


class LocalStore(dist.Store):
    """A rank's connection to a `StoreServer`. Raises what TCPStore raises; every answer has the store's `timeout`."""

    timeout: timedelta  # torch's stub lacks it

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._clones: list[LocalStore] = []

    def _ask(self, *question: Any, slack_s: float = 0.0) -> Any:
        timeout_s = min(self.timeout.total_seconds() + slack_s, _LONGEST_S)
        with self._lock:
            # Kept only once it has answered: after an error or a signal this question's answer may still arrive.
            connection, self._connection = self._connection, None
            try:
                connection = connection or self._connect()
                connection.send(question)
                if not connection.poll(timeout_s):
                    raise dist.DistStoreError(
                        f"the launcher is stopped: its store did not answer for {timeout_s:.1f} s"
                    )
                answer = connection.recv()
            except (EOFError, OSError) as error:
                raise dist.DistNetworkError(f"the launcher's store can't be reached: {error}") from error
            self._connection = connection
            return answer

    def _connect(self) -> Connection:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(f"\0{self._name}")
            if peer_uid(connection) != os.getuid():
                raise PermissionError(f"the socket @{self._name} belongs to another user, uid {peer_uid(connection)}")
            return Connection(connection.detach())

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", key, value.encode() if isinstance(value, str) else bytes(value))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._wait_for(keys, self.timeout)

    def get(self, key: str) -> bytes:
        return self._wait_for([key], self.timeout)[0]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._wait_for(keys, timeout or self.timeout)

    def _wait_for(self, keys: list[str], timeout: timedelta) -> list[bytes]:
        timeout_s = min(timeout.total_seconds(), _LONGEST_S)
        values = self._ask("get", list(keys), timeout_s, slack_s=timeout_s + _SLACK_S)
        if values is None:
            raise dist.DistStoreError(f"wait timeout after {timeout_s:.1f} s, keys: {', '.join(keys)}")
        return values

    def check(self, keys: list[str]) -> bool:
        return self._ask("check", list(keys))

    def add(self, key: str, amount: int) -> int:
        return self._ask("add", key, amount)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        both = (each.encode() if isinstance(each, str) else bytes(each) for each in (expected, desired))
        return self._ask("compare_set", key, *both)

    def delete_key(self, key: str) -> bool:
        return self._ask("delete_key", key)

    deleteKey = delete_key  # the name that torch's C++ calls

    def clone(self) -> LocalStore:
        """Another connection. Kept here, as torch's C++ side does not keep a store's Python side."""
        self._clones.append(LocalStore(self._name))
        self._clones[-1].set_timeout(self.timeout)
        return self._clones[-1]


@functools.cache  # one per process, never freed: see `clone`
def _store(name: str) -> LocalStore:
    return LocalStore(name)


def _rendezvous(url: str, timeout: timedelta, **_: Any) -> Iterator[tuple[dist.Store, int, int]]:
    store = _store(os.environ[STORE])
    store.set_timeout(timeout)
    yield store, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


dist.register_rendezvous_handler("odc", _rendezvous)
