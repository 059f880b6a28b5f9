"""Abstract Unix sockets, nothing on disk: over one, a rank hands open files to the others of its host."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import time

from ...base.errors import DeadlineExceeded
from .greetings import greetings

_POLL_S = 0.02
_GREETING = struct.Struct("i")  # rank


def peer_uid(connection: socket.socket) -> int:
    """Whose process is at the other end."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", credentials)[1]


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
                f"another process has taken the socket @{name}, whose name is random and this job's own: look for it "
                f"in `ss -xlp`, end it, and start again"
            ) from None
        raise
    return listener


def send_files(fds: list[int], *, token: str, world: int, timeout_s: float) -> None:
    """Rank 0's side: gives `fds` to ranks 1..world-1, each of which says its rank and must have our uid."""
    waiting = set(range(1, world))
    deadline_s = time.monotonic() + timeout_s
    with listen(f"odc-{token}", backlog=world) as listener:
        for connection, greeting in greetings(listener, _GREETING.size, deadline_s):
            (rank,) = _GREETING.unpack(greeting)
            with connection:
                if peer_uid(connection) == os.getuid() and rank in waiting:
                    # A rank may have died or given up meanwhile; if it is missed, the deadline says so.
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


def receive_files(count: int, *, token: str, rank: int, timeout_s: float) -> list[int]:
    """The other ranks' side: connects to rank 0 and returns `count` file descriptors."""
    deadline_s = time.monotonic() + timeout_s
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
        time.sleep(_POLL_S)
