"""Clients that connect and say nothing keep greetings waiting for none; statuses that come in segments."""

from __future__ import annotations

import contextlib
import socket
import time

from odc_triton.comm.memory.rendezvous import _MOST_SILENT, greetings
from odc_triton.comm.peers import _STATUS, PeerStatus
from tests.support.deadlines import LONG_S


def test_silent_clients_keep_nobody_waiting() -> None:
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=1000))
        place = listener.getsockname()
        silent = [stack.enter_context(socket.create_connection(place, timeout=LONG_S)) for _ in range(_MOST_SILENT + 2)]
        silent[-1].sendall(b"half")
        with socket.create_connection(place) as gone:
            gone.sendall(b"half")
        speaker = stack.enter_context(socket.create_connection(place))
        speaker.sendall(b"a greeting and more")
        arrivals = greetings(listener, 10, time.monotonic() + LONG_S)
        connection, said = next(arrivals)
        with connection:
            assert (said, connection.recv(9)) == (b"a greeting", b" and more")
        assert silent[0].recv(1) == b""  # the oldest ones are hung up on, the others may still speak
        silent[-1].sendall(b" later")
        connection, said = next(arrivals)
        with connection:
            assert said == b"half later"
        arrivals.close()
        assert silent[-2].recv(1) == b""
        assert next(greetings(listener, 10, time.monotonic() + 0.05), None) is None


def test_statuses_may_come_in_segments() -> None:
    peers = PeerStatus.__new__(PeerStatus)
    peers._unread, peers._far_status = {1: b""}, {1: [0] * 16}
    said = _STATUS.pack(3, 7) + _STATUS.pack(4, 2**40) + _STATUS.pack(3, 8)
    for first in range(0, len(said), 5):
        peers._take(1, said[first : first + 5])
    assert peers._far_status[1] == [0, 0, 0, 8, 2**40, *[0] * 11]
