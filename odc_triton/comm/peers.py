"""Status of the ranks of other replicas, which share no memory with this rank: a TCP connection to each.

The kernel closes a connection when the process at its other end dies, however it dies, so dead ranks differ from late
ones at once, as by the heap's locks on one host. Keep-alive finds a host that vanished, within seconds.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time
import weakref
from multiprocessing.util import Finalize

import torch.distributed as dist

from ..base.errors import DeadlineExceeded
from .barrier import Barrier, host_of
from .memory.heap import LEFT, STATUS_SLOTS, StatusBoard, SymmetricHeap
from .memory.rendezvous import greetings

_STATUS = struct.Struct("<iq")  # slot, value
_GREETING = struct.Struct("<32si")  # the job's secret, rank
_KEEPALIVE_IDLE_S, _KEEPALIVE_EVERY_S, _KEEPALIVE_COUNT = 3, 1, 4
_UNREACHABLE_MS = 1000 * (_KEEPALIVE_IDLE_S + _KEEPALIVE_EVERY_S * _KEEPALIVE_COUNT)


def address_towards(store: dist.Store) -> str | None:
    """This host's address for ranks on other hosts: that of the interface from which it reaches the store's host.

    None if that is the loopback interface: the store is on this host.
    """
    host, port = host_of(store)
    if host is None:
        return None
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # on a datagram socket it looks up the route and sends nothing
        mine = probe.getsockname()[0]
    return None if mine.startswith("127.") or mine == "::1" else mine


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_EVERY_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE_COUNT)
    # While something is not acknowledged there are no keep-alives, and TCP alone would try for a quarter of an hour.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNREACHABLE_MS)
    connection.setblocking(False)


def _hang_up(connections: dict[int, socket.socket]) -> None:
    for connection in connections.values():
        with contextlib.suppress(OSError):
            connection.send(_STATUS.pack(LEFT, 1))
    _close(connections)


def _close(connections: dict[int, socket.socket]) -> None:
    for connection in connections.values():
        connection.close()
    connections.clear()


class PeerStatus(StatusBoard):
    """The status of all ranks: of this replica's from its heap, of the others' from a connection to each of them.

    Collective; `barrier` still uses the store at this point. `store`: the job's, to find the way to other hosts;
    `token`: a name of 32 letters that only these ranks know. Raises DeadlineExceeded with the ranks that could not be
    reached within the barrier's deadline.

    Every rank keeps a connection, an open file, to every rank of other replicas, so each knows which are
    gone.
    """

    def __init__(self, *, heap: SymmetricHeap, barrier: Barrier, store: dist.Store, token: str) -> None:
        self._heap, self._first, self._rank = heap, heap.first, barrier.rank
        self._near = range(heap.first, heap.first + heap.world)
        self._far = [rank for rank in range(barrier.world) if rank not in self._near]
        self._far_status = {rank: [0] * STATUS_SLOTS for rank in self._far}
        self._unread = dict.fromkeys(self._far, b"")
        self._unsent = dict.fromkeys(self._far, b"")
        self._lock = threading.Lock()
        self._poll = select.poll()
        self._ranks: dict[int, int] = {}  # by file descriptor
        self._connections: dict[int, socket.socket] = {}
        self._connect(barrier, store, token.encode())
        for rank, connection in self._connections.items():
            _keep_alive(connection)
            self._ranks[connection.fileno()] = rank
            self._poll.register(connection, select.POLLIN)
        self._finish = Finalize(self, _hang_up, (self._connections,), exitpriority=0)
        # A data loader's worker must not hold its parent's connections open.
        ours = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: (this := ours()) is not None and _close(this._connections))

    def _connect(self, barrier: Barrier, store: dist.Store, token: bytes) -> None:
        """Ranks connect to those of lower numbers."""
        mine = address_towards(store)
        addresses = barrier.exchange("connecting replicas: addresses", {"address": mine})
        loopback_only = all(theirs["address"] is None for theirs in addresses)
        family = socket.AF_INET6 if mine is not None and ":" in mine else socket.AF_INET
        # A rank on the store's host does not know the address by which others reach it.
        bound = mine or ("127.0.0.1" if loopback_only else "")
        deadline_s = time.monotonic() + barrier.timeout_s
        with socket.create_server((bound, 0), family=family, backlog=max(len(self._far), 1)) as listener:
            message = {"address": mine, "port": listener.getsockname()[1]}
            places = barrier.exchange("connecting replicas: ports", message)
            for rank in self._far:
                if rank < self._rank:
                    host = places[rank]["address"] or (mine and host_of(store)[0]) or "127.0.0.1"
                    self._connections[rank] = self._call(rank, host, places[rank]["port"], token, deadline_s)
            self._answer({rank for rank in self._far if rank > self._rank}, listener, token, deadline_s)

    def _call(self, rank: int, host: str, port: int, token: bytes, deadline_s: float) -> socket.socket:
        try:
            left_s = max(deadline_s - time.monotonic(), 0.001)
            connection = socket.create_connection((host, port), timeout=left_s)
            connection.sendall(_GREETING.pack(token, self._rank))
        except OSError as error:
            raise DeadlineExceeded(
                [rank],
                f"rank {self._rank} can't reach rank {rank} of another replica at {host}:{port}: {error}. Replicas "
                f"need TCP connections between their hosts, on any port",
            ) from error
        return connection

    def _answer(self, missing: set[int], listener: socket.socket, token: bytes, deadline_s: float) -> None:
        if not missing:
            return
        for connection, greeting in greetings(listener, _GREETING.size, deadline_s):
            secret, rank = _GREETING.unpack(greeting)
            if secret != token or rank not in missing:
                connection.close()
                continue
            missing.discard(rank)
            self._connections[rank] = connection
            if not missing:
                return
        ranks = sorted(missing)
        raise DeadlineExceeded(
            ranks,
            f"rank {self._rank} was not reached by ranks {ranks} of other replicas: they need TCP connections "
            f"between their hosts, on any port",
        )

    def new_slot(self) -> int:
        return self._heap.new_slot()

    def show(self, slot: int, value: int) -> None:
        self._heap.show(slot, value)
        with self._lock:
            for rank in self._far:
                if rank in self._connections:
                    self._unsent[rank] += _STATUS.pack(slot, value)
                    self._send(rank)

    def _send(self, rank: int) -> None:
        """Sends what it can without waiting; what a stopped rank does not take is sent with the next status."""
        try:
            sent = self._connections[rank].send(self._unsent[rank])
            self._unsent[rank] = self._unsent[rank][sent:]
        except BlockingIOError:
            pass
        except OSError:
            self._listen()  # what it sent before it died counts

    def seen(self, slot: int) -> list[int]:
        with self._lock:
            self._listen()
        near = self._heap.seen(slot)
        return [
            near[rank - self._first] if rank in self._near else self._far_status[rank][slot]
            for rank in range(len(near) + len(self._far))
        ]

    def is_alive(self, rank: int) -> bool:
        if rank in self._near:
            return self._heap.is_alive(rank - self._first)
        with self._lock:
            self._listen()
        return rank in self._connections

    def _listen(self) -> None:
        for descriptor, _ in self._poll.poll(0):
            rank = self._ranks[descriptor]
            connection = self._connections.get(rank)
            if connection is None:
                continue
            try:
                while data := connection.recv(65536):
                    self._take(rank, data)
            except BlockingIOError:
                continue
            except OSError:
                pass
            self._poll.unregister(descriptor)
            del self._connections[rank]
            connection.close()

    def _take(self, rank: int, data: bytes) -> None:
        data = self._unread[rank] + data
        whole = len(data) - len(data) % _STATUS.size
        for slot, value in _STATUS.iter_unpack(data[:whole]):
            self._far_status[rank][slot] = value
        self._unread[rank] = data[whole:]

    def close(self) -> None:
        """Says that this rank left."""
        self._finish()
