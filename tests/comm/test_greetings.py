"""Clients that connect and say nothing: they keep neither greetings nor ranks of other replicas waiting."""

from __future__ import annotations

import contextlib
import socket
import time
from typing import Any

import torch.distributed as dist
from torch import nn

from odc_triton import fully_shard
from odc_triton.comm.memory.rendezvous import _MOST_SILENT, greetings
from odc_triton.comm.peers import _STATUS, PeerStatus
from tests.support import ranks
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


def _among_silent_clients(rank: int, world: int) -> tuple[list[bool], float]:
    """Strangers connect to rank 0's port before rank 1 does."""
    call, strangers = PeerStatus._call, []

    def come_after_strangers(self: PeerStatus, peer: int, host: str, port: int, *rest: Any) -> socket.socket:
        strangers.extend(socket.create_connection((host, port)) for _ in range(3))
        return call(self, peer, host, port, *rest)

    PeerStatus._call = come_after_strangers
    start_s = time.monotonic()
    model = fully_shard(
        nn.Linear(2, 2), mesh=dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    )
    seconds = time.monotonic() - start_s
    alive = [model._odc_engine.barrier.board.is_alive(peer) for peer in range(world)]
    for stranger in strangers:
        stranger.close()
    dist.barrier()
    return alive, seconds


def test_silent_clients_keep_no_replica_waiting() -> None:
    for alive, seconds in ranks.run(_among_silent_clients, 2):
        assert alive == [True, True]
        assert seconds < LONG_S / 2  # not until the strangers' deadline


def test_statuses_may_come_in_pieces() -> None:
    peers = PeerStatus.__new__(PeerStatus)
    peers._unread, peers._far_status = {1: b""}, {1: [0] * 16}
    said = _STATUS.pack(3, 7) + _STATUS.pack(4, 2**40) + _STATUS.pack(3, 8)
    for first in range(0, len(said), 5):
        peers._take(1, said[first : first + 5])
    assert peers._far_status[1] == [0, 0, 0, 8, 2**40, *[0] * 11]
