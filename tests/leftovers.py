"""What a job could leave behind for others to see: names in /dev/shm, abstract sockets of ours."""

from __future__ import annotations

import os
import time
from pathlib import Path


def names() -> set[str]:
    # Python's own semaphores (sem.mp-…) are of tests that run beside this one: we make none.
    shared = (name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-"))
    sockets = (line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines() if "@odc-" in line)
    return {*shared, *sockets}


def assert_none_since(before: set[str], *, timeout_s: float = 20) -> None:
    """None of the names that are new stays. Other jobs of this machine have some too, but not for long."""
    new = names() - before
    deadline_s = time.monotonic() + timeout_s
    while new := new & names():
        assert time.monotonic() < deadline_s, f"{sorted(new)} stayed behind"
        time.sleep(0.1)
