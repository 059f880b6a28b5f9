"""Four ranks, two on each of two hosts: network namespaces, as close to hosts as one machine gets.

`unshare -rn python -m tests.support.two_hosts FOLDER` starts them and waits; each writes what it saw to FOLDER/RANK.pt.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

from bench.suites.hosts_net import INTERFACE, Hosts
from tests.support.deadlines import LONG_S

STEPS = 3


def start(folder: str) -> int:
    """Starts the ranks and returns how many of them failed; the last one kills itself."""
    hosts = Hosts(2)
    places = {"WORLD_SIZE": "4", "MASTER_ADDR": hosts.addresses[0], "MASTER_PORT": "29500"}
    started = []
    for rank in range(4):
        command = hosts.on(rank // 2, sys.executable, "-m", "tests.support.two_hosts", folder, "as a rank")
        environment = os.environ | places | {"RANK": str(rank), "GLOO_SOCKET_IFNAME": INTERFACE}
        started.append(subprocess.Popen(command, env=environment))
    codes = [process.wait(timeout=LONG_S) for process in started]
    hosts.close()
    return sum(code != 0 for code in codes[:3])


def _heaps() -> set[str]:
    """Inodes of the heaps that this process has mapped."""
    return {line.split()[4] for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:odc-heap" in line}


def be_rank(folder: str) -> None:
    import torch
    import torch.distributed as dist

    from odc_triton import OdcError, fully_shard, minibatch
    from odc_triton.engine.api import engine_of
    from tests.support.parity import SIZES, sharded
    from tests.support.replicas import Rows, mesh_of

    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=LONG_S))
    seen = {}
    try:
        fully_shard(Rows(), mesh=mesh_of((4,)), timeout=timedelta(seconds=LONG_S))
    except OdcError as error:
        seen["one dimension"] = str(error)
    grid = engine_of(fully_shard(Rows(), timeout=timedelta(seconds=LONG_S))).grid
    seen["without a mesh"] = grid.replicas, grid.twins
    (seen["trained"],) = sharded(
        rank, 4, [("conv", "none")], STEPS, "fused", "root", "cpu", False, tuple(SIZES), (2, 2)
    )
    model = fully_shard(Rows(), mesh=mesh_of((2, 2)), timeout=timedelta(seconds=LONG_S))
    seen["heaps"] = _heaps()
    dist.barrier()
    start_s = time.monotonic()
    try:
        with minibatch(model, tokens=1):
            if rank == 3:
                torch.save(seen, f"{folder}/{rank}.pt")
                os.kill(os.getpid(), signal.SIGKILL)
    except OdcError as error:
        seen["killed"] = type(error).__name__, error.ranks, time.monotonic() - start_s
    torch.save(seen, f"{folder}/{rank}.pt")
    os._exit(0)  # the process group would wait for the killed rank


if __name__ == "__main__":
    sys.exit(start(sys.argv[1]) if len(sys.argv) == 2 else be_rank(sys.argv[1]))
