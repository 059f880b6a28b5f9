"""Who connects to a socket and says who it is; clients that say nothing keep nobody waiting."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Iterator

_MOST_SILENT = 128  # open files that clients which say nothing may cost


def greetings(listener: socket.socket, size: int, deadline_s: float) -> Iterator[tuple[socket.socket, bytes]]:
    """Connections to `listener`, each as soon as its first `size` bytes are here, and these bytes.

    Ends at `deadline_s` of `time.monotonic`. A connection does not block, and is the caller's to close. Those that
    have not said all by then are closed; where there are many, the oldest at once.
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
                ready = {key.fileobj for key, _ in selector.select(left_s)}
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
                    with contextlib.suppress(BlockingIOError, ConnectionError):  # it has gone again
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
