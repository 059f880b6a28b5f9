"""Local buffers into which weights are pulled for kernels that wait for them shard by shard."""

from __future__ import annotations

import threading

import torch

from odc_kernels.peers import PeerShards
from odc_kernels.staged import StagedWeight, check, pull
from odc_kernels.streams import Device

_BUFFERS = 2  # of each shape: one is filled while a kernel reads the other


class Staging:
    """Two buffers for each shape, dtype and thread, taken in turns: memory does not grow with the number of layers.

    With autograd's threads a forward's and a backward's are different ones, so there may be four. `device`: a simulated
    one for the copies.
    """

    def __init__(self, device: Device | None = None) -> None:
        self._device = device
        self._rings: dict[tuple[tuple[int, ...], torch.dtype, int], list[StagedWeight]] = {}

    def pull(self, peers: PeerShards) -> StagedWeight:
        """Begins to copy a weight [N, K] into the buffer that was used longest ago; see `odc_kernels.staged.pull`."""
        ring = self._rings.setdefault((peers.shape, peers.dtype, threading.get_ident()), [])
        buffer = StagedWeight.of(peers, on=self._device) if len(ring) < _BUFFERS else ring.pop(0)
        pulled = pull(peers=peers, staged=buffer)
        ring.append(pulled)
        return pulled

    def check(self) -> None:
        """Raises TimeoutError if a kernel waited in vain for a shard since the last check. Waits for the device."""
        for ring in self._rings.values():
            for buffer in ring:
                check(buffer)
