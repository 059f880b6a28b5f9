"""Abstract Unix sockets, nothing on disk: over one, a rank passes open files to the others on its host.

Clients introduce themselves; a silent one delays no other.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterator

from ...base.errors import DeadlineExceeded

STORE = "ODC_STORE"  # the variable by which our launcher tells its ranks the name of its store's socket
Look = Callable[[list[int]], None]
"""Looks whether these ranks, for which it waits, are alive; raises if not."""
_LOOK_S = 0.5
_MOST_SILENT = 128  # connections kept open to silent clients


def greetings(
    listener: socket.socket, size: int, deadline_s: float, look: Callable[[], None] = lambda: None
) -> Iterator[tuple[socket.socket, bytes]]:
    """Connections to `listener`, each as soon as its first `size` bytes have arrived, with these bytes.

    Ends at `deadline_s` of `time.monotonic`. A connection does not block, and the caller closes it. Those that have not
    sent all their bytes by then are closed; if there are very many, the oldest at once. While nothing comes it calls
    `look`.
    """
    heard: dict[socket.socket, bytes] = {}  # the oldest first
    listener.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)

        def take(connection: socket.socket) -> bytes:
            selector.unregister(connection)
            return heard.pop(connection)

        try:
            while (left_s := deadline_s - time.monotonic()) > 0:
                ready = {key.fileobj for key, _ in selector.select(min(left_s, _LOOK_S))}
                if not ready:
                    look()
                for connection in heard.keys() & ready:
                    try:
                        more = connection.recv(size - len(heard[connection]))
                    except OSError:
                        more = b""
                    heard[connection] += more
                    if len(heard[connection]) == size:
                        yield connection, take(connection)
                    elif not more:
                        take(connection)
                        connection.close()
                if listener in ready:
                    with contextlib.suppress(BlockingIOError, ConnectionError):  # the client is gone
                        connection, _ = listener.accept()
                        connection.setblocking(False)
                        heard[connection] = b""
                        selector.register(connection, selectors.EVENT_READ)
                if len(heard) > _MOST_SILENT:
                    oldest = next(iter(heard))
                    take(oldest)
                    oldest.close()
        finally:
            for connection in heard:
                connection.close()


_POLL_S = 0.02
_GREETING = struct.Struct("i")  # rank


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the process at the other end."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", credentials)[:2]


def peer_uid(connection: socket.socket) -> int:
    return peer_of(connection)[1]


def listen(name: str, *, backlog: int) -> socket.socket:
    """Listens on the abstract Unix socket `name`. Raises FileExistsError where another process has it."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(f"\0{name}")
        listener.listen(backlog)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise FileExistsError(
                f"another process has taken the socket @{name}, although its name is random and only this job knows "
                f"it: find that process with `ss -xlp`, end it, and start again"
            ) from None
        raise
    return listener


def look_at_nobody(ranks: list[int]) -> None: ...


def send_files(fds: list[int], *, token: str, world: int, timeout_s: float, look: Look = look_at_nobody) -> None:
    """Rank 0's side: sends `fds` to ranks 1..world-1, each of which sends its rank and must have our uid."""
    waiting = set(range(1, world))
    deadline_s = time.monotonic() + timeout_s
    with listen(f"odc-{token}", backlog=world) as listener:
        for connection, greeting in greetings(listener, _GREETING.size, deadline_s, lambda: look(sorted(waiting))):
            (rank,) = _GREETING.unpack(greeting)
            with connection:
                if peer_uid(connection) == os.getuid() and rank in waiting:
                    # A rank may have died or given up meanwhile; then `look` or the deadline names it.
                    with contextlib.suppress(ConnectionError):
                        socket.send_fds(connection, [b"f"], fds)
                        waiting.discard(rank)
            if not waiting:
                return
    missing = sorted(waiting)
    raise DeadlineExceeded(
        missing,
        f"rank 0 waited {timeout_s:.0f} s for ranks {missing} to open the shared heap; "
        f"they must run on this host and in its network namespace",
    )


def receive_files(count: int, *, token: str, rank: int, timeout_s: float, look: Look = look_at_nobody) -> list[int]:
    """The other ranks' side: connects to rank 0 and returns `count` file descriptors."""
    look_s = time.monotonic()
    deadline_s = look_s + timeout_s
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(max(deadline_s - time.monotonic(), 0.001))
            try:
                connection.connect(f"\0odc-{token}")
                if peer_uid(connection) != os.getuid():
                    raise PermissionError(f"rank 0's heap socket belongs to uid {peer_uid(connection)}, not to ours")
                connection.sendall(_GREETING.pack(rank))
                _, fds, _, _ = socket.recv_fds(connection, 1, count)
                if len(fds) == count:
                    for fd in fds:
                        os.set_inheritable(fd, False)
                    return list(fds)
            except (ConnectionError, BlockingIOError, TimeoutError):
                pass
        if time.monotonic() > deadline_s:
            raise DeadlineExceeded(
                [0],
                f"rank {rank} waited {timeout_s:.0f} s for rank 0 to offer the shared heap; "
                f"both must run on one host and in one network namespace",
            )
        if time.monotonic() > look_s + _LOOK_S:
            look_s = time.monotonic()
            look([0])
        time.sleep(_POLL_S)
