"""One rank hands open files to the others of its host: over an abstract Unix socket, nothing on disk."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time

from ..errors import DeadlineExceeded
from ..greetings import greetings

_POLL_S = 0.02
_GREETING = struct.Struct("i")  # rank


def _peer_uid(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", credentials)[1]


def send_files(fds: list[int], *, token: str, world: int, timeout_s: float) -> None:
    """Rank 0's side: gives `fds` to ranks 1..world-1, each of which says its rank and must have our uid."""
    waiting = set(range(1, world))
    deadline_s = time.monotonic() + timeout_s
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(f"\0odc-{token}")
        listener.listen(world)
        for connection, greeting in greetings(listener, _GREETING.size, deadline_s):
            (rank,) = _GREETING.unpack(greeting)
            with connection:
                if _peer_uid(connection) == os.getuid() and rank in waiting:
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
                if _peer_uid(connection) != os.getuid():
                    raise PermissionError(f"rank 0's heap socket belongs to uid {_peer_uid(connection)}, not to ours")
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
