"""The least time that a call could take on this GPU: the slowest of its arithmetic, its memory and its link."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bench.device import Gpu
from bench.kernels.operators.operator import Work
from bench.kernels.operators.timing import interleaved, quantiles


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What this GPU reached in this run, so that its clocks and its heat are in the roofline. `link_bytes_s`: of pinned
    host memory, 0 where there is no link.
    """

    flops: float
    hbm_bytes_s: float  # counting what is read and what is written
    link_bytes_s: float = 0.0

    @classmethod
    def measured(cls, gpu: Gpu, *, dtype: torch.dtype, peers: str, seconds: float = 0.5) -> Machine:
        """The rates of the library's product of two square matrices and of copies, on random numbers."""
        a, b = (torch.randn(gpu.side, gpu.side, device=gpu.type, dtype=dtype) for _ in range(2))
        source = torch.randint(-128, 127, (gpu.copy_bytes,), dtype=torch.int8, device=gpu.type)
        target, out = torch.empty_like(source), torch.empty_like(a)
        runs = {"product": lambda: torch.mm(a, b, out=out), "copy": lambda: target.copy_(source)}
        if peers == "pinned":
            pinned = source.cpu().pin_memory()
            runs["link"] = lambda: target.copy_(pinned, non_blocking=True)
        for run in runs.values():
            run()
        second = {name: quantiles(us)["p50"] / 1e6 for name, us in interleaved(runs, gpu, seconds=seconds).items()}
        return cls(
            flops=2 * gpu.side**3 / second["product"],
            hbm_bytes_s=2 * gpu.copy_bytes / second["copy"],
            link_bytes_s=gpu.copy_bytes / second["link"] if "link" in second else 0.0,
        )

    def seconds(self, work: Work) -> float:
        """The roofline. Without a link the peers' memory is this GPU's, and its traffic is added to the own."""
        if self.link_bytes_s:
            return max(work.flops / self.flops, work.hbm_bytes / self.hbm_bytes_s, work.link_bytes / self.link_bytes_s)
        return max(work.flops / self.flops, (work.hbm_bytes + work.peer_bytes) / self.hbm_bytes_s)
