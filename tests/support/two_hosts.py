"""Four ranks, two in each of two network namespaces with a cable between: as close to two hosts as one machine gets.

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

from tests.support.deadlines import LONG_S

PORT = "29500"  # in a separate namespace
ADDRESSES = ("10.77.0.1", "10.77.0.2")
STEPS = 3


def why_not() -> str | None:
    """Why such namespaces are impossible here; None if they are possible."""
    try:
        done = subprocess.run(
            ["unshare", "-rn", "ip", "link", "add", "odc0", "type", "veth", "peer", "name", "odc1"],
            capture_output=True,
            text=True,
            timeout=LONG_S,
        )
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if done.returncode == 0 else f"no network namespaces: {done.stderr.strip()}"


def start(folder: str) -> int:
    """Connects the namespaces, starts the ranks, and returns how many of them failed; the last one kills itself."""
    other = subprocess.Popen(["unshare", "-n", "sleep", "3000"])
    try:
        inside = ["nsenter", "-t", str(other.pid), "-n"]
        here = os.readlink("/proc/self/ns/net")
        while os.readlink(f"/proc/{other.pid}/ns/net") == here:
            time.sleep(0.01)
        subprocess.run(
            ["ip", "link", "add", "odc0", "type", "veth", "peer", "name", "odc1", "netns", str(other.pid)], check=True
        )
        for prefix, device, address in (([], "odc0", ADDRESSES[0]), (inside, "odc1", ADDRESSES[1])):
            subprocess.run([*prefix, "ip", "link", "set", "lo", "up"], check=True)
            subprocess.run([*prefix, "ip", "addr", "add", f"{address}/24", "dev", device], check=True)
            subprocess.run([*prefix, "ip", "link", "set", device, "up"], check=True)
        started = []
        for rank in range(4):
            places = {"RANK": str(rank), "WORLD_SIZE": "4", "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": PORT}
            places["GLOO_SOCKET_IFNAME"] = f"odc{rank // 2}"
            command = [
                *(inside if rank > 1 else []),
                sys.executable,
                "-m",
                "tests.support.two_hosts",
                folder,
                "as a rank",
            ]
            started.append(subprocess.Popen(command, env=os.environ | places))
        codes = [process.wait(timeout=LONG_S) for process in started]
        return sum(code != 0 for code in codes[:3])
    finally:
        other.kill()
        other.wait()


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
