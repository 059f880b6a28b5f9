"""What a job could leave behind for others to see: names in /dev/shm, abstract sockets of ours, processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from tests.support.deadlines import LONG_S


def environment() -> dict[str, str]:
    """For a process that a test starts: it finds the package and the tests wherever it runs."""
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}


def names() -> set[str]:
    # Python's own semaphores and blocks (of vLLM) are from tests that run at the same time: we create none.
    shared = (name for name in os.listdir("/dev/shm") if not name.startswith(("sem.mp-", "psm_")))
    sockets = (line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines() if "@odc-" in line)
    return {*shared, *sockets}


def assert_none_since(before: set[str], *, timeout_s: float = LONG_S) -> None:
    """No new name stays. Other jobs on this machine have some too, but not for minutes."""
    new = names() - before
    deadline_s = time.monotonic() + timeout_s
    while new := new & names():
        assert time.monotonic() < deadline_s, f"{sorted(new)} stayed behind"
        time.sleep(0.1)


def ctrl_c(process: subprocess.Popen) -> None:
    """As a terminal sends it: to all processes."""
    os.killpg(process.pid, signal.SIGINT)


def interrupted(
    command: list[str], has_come: Callable[[subprocess.Popen], bool], how: Callable[[subprocess.Popen], None] = ctrl_c
) -> tuple[int, str]:
    """Runs `command`, stops it once `has_come`; returns its status and what it wrote to stderr. It must leave nothing
    behind.
    """
    before, deadline_s = names(), time.monotonic() + LONG_S
    process = subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        while process.poll() is None and not has_come(process):
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        how(process)
        _, problems = process.communicate(timeout=LONG_S)
        with contextlib.suppress(ProcessLookupError):
            while True:
                os.killpg(process.pid, 0)
                assert time.monotonic() < deadline_s, "processes stayed behind"
                time.sleep(0.01)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert_none_since(before)
    return process.returncode, problems


def _state(pid: int) -> str:
    """Its letter in /proc; X where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def is_stopped(pid: int) -> bool:
    return _state(pid) in "Tt"


def is_running(pid: int) -> bool:
    """Also a stopped one; not one that has ended and that its parent has not asked for yet."""
    return _state(pid) not in "ZX"
