"""The least time that a call could take on this GPU: the slowest of its arithmetic, its memory and its link."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bench.operators.operator import Work
from bench.operators.timing import interleaved, quantiles

_SIDE = 8192
_COPY_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What this GPU reached in this run, so that its clocks and its heat are in the roofline. `link_bytes_s`: of pinned
    host memory, 0 where there is no link.
    """

    flops: float
    hbm_bytes_s: float  # counting what is read and what is written
    link_bytes_s: float = 0.0

    @classmethod
    def measured(cls, *, dtype: torch.dtype, peers: str, seconds: float = 0.5) -> Machine:
        """The rates of the library's 8192³ product and of copies of 1 GiB, on random numbers."""
        a, b = (torch.randn(_SIDE, _SIDE, device="cuda", dtype=dtype) for _ in range(2))
        source = torch.randint(-128, 127, (_COPY_BYTES,), dtype=torch.int8, device="cuda")
        target, out = torch.empty_like(source), torch.empty_like(a)
        runs = {"product": lambda: torch.mm(a, b, out=out), "copy": lambda: target.copy_(source)}
        if peers == "pinned":
            pinned = source.cpu().pin_memory()
            runs["link"] = lambda: target.copy_(pinned, non_blocking=True)
        for run in runs.values():
            run()
        second = {name: quantiles(us)["p50"] / 1e6 for name, us in interleaved(runs, seconds=seconds).items()}
        return cls(
            flops=2 * _SIDE**3 / second["product"],
            hbm_bytes_s=2 * _COPY_BYTES / second["copy"],
            link_bytes_s=_COPY_BYTES / second["link"] if "link" in second else 0.0,
        )

    def seconds(self, work: Work) -> float:
        """The roofline. Without a link the peers' memory is this GPU's, and its traffic is added to the own."""
        if self.link_bytes_s:
            return max(work.flops / self.flops, work.hbm_bytes / self.hbm_bytes_s, work.link_bytes / self.link_bytes_s)
        return max(work.flops / self.flops, (work.hbm_bytes + work.peer_bytes) / self.hbm_bytes_s)
