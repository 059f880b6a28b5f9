"""A meeting of all ranks of one machine in well under a millisecond: what stands for a collective's waiting.

Gloo's barrier passes through log2(ranks) rounds of two threads each, which many ranks on few cores feel; this one wakes
rank 0 as ranks arrive and then every rank once.
"""

from __future__ import annotations

import socket
import struct

import torch.distributed as dist

_LONGEST_WAIT_S = 300.0


class Gate:
    """Collective: every rank of the process group makes one, then calls `meet` equally often.

    Raises TimeoutError where a rank does not come within five minutes, ConnectionError where one has died.
    """

    def __init__(self, name: str) -> None:
        """`name`: of an abstract Unix socket, the same on every rank, used by no other job."""
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._peers: list[socket.socket] = []
        address = f"\0odc-gate-{name}"
        if self.rank == 0:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
                listener.bind(address)
                listener.listen(self.world)
                dist.barrier()
                while len(self._peers) < self.world - 1:
                    listener.settimeout(_LONGEST_WAIT_S)
                    self._peers.append(listener.accept()[0])
        else:
            dist.barrier()
            peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            peer.connect(address)
            self._peers.append(peer)
        for peer in self._peers:
            # The kernel's own deadline: Python's would make each `recv` two system calls.
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(_LONGEST_WAIT_S), 0))

    def meet(self) -> None:
        """Returns when all ranks have called it."""
        if self.rank != 0:
            self._peers[0].send(b"x")
        for peer in self._peers:
            if peer.recv(1) != b"x":
                raise ConnectionError(f"rank {self.rank}: a peer has left before the gate opened")
        if self.rank == 0:
            for peer in self._peers:
                peer.send(b"x")

    def close(self) -> None:
        for peer in self._peers:
            peer.close()
