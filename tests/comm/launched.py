"""What the launcher's ranks do in tests. It imports no torch, so that ranks start in a moment."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from tests.support.deadlines import LONG_S, until


def work(what: str, folder: str) -> dict:
    rank = int(os.environ["RANK"])
    Path(folder, f"rank-{rank}").write_text(str(os.getpid()))
    if what == "return":
        import torch
        import torch.distributed as dist

        from odc_triton.comm.process_group import rendezvous_url

        dist.init_process_group("gloo", rendezvous_url())
        total = torch.tensor([rank + 1.0])
        dist.all_reduce(total)
        dist.destroy_process_group()
        return {"rank": rank, "sum": total}
    if what == "raise" and rank == 1:
        raise ValueError("in two\nlines")
    if what == "all raise":
        until(lambda: len(list(Path(folder).glob("rank-*"))) == 2)  # a rank that starts much later would be told to end
        raise OSError("no such data")
    if what == "blames" and rank == 0:
        from odc_triton.base.errors import RankLost

        until(Path(folder, "rank-1").exists)  # a rank that starts much later would be told to end
        raise RankLost([1], "rank 1 died")
    if what == "blames":
        until(Path(folder, "rank-0").exists)
        time.sleep(0.5)
        raise ValueError("the cause")
    if what == "killed" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "exits":
        sys.exit() if rank == 1 else None
        return {"rank": rank}
    if what == "exits with a reason" and rank == 1:
        sys.exit("no data for it")
    if what == "stopped":
        sys.exit(128 + signal.SIGTERM)
    if what.startswith("Ctrl-C") and rank == 1:
        until(lambda: what == "Ctrl-C" or Path(folder, "deaf").exists())
        os.kill(os.getpid(), signal.SIGINT)
    if what in ("Ctrl-C, blamed", "Ctrl-C, and a failure"):
        from odc_triton.base.errors import RankLost

        signal.signal(signal.SIGINT, signal.SIG_IGN)
        Path(folder, "deaf").touch()
        time.sleep(0.5)
        raise RankLost([1], "rank 1 died") if "blamed" in what else ValueError("no space")
    time.sleep(LONG_S)
    return {}
