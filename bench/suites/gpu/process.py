"""Commands of the GPU suite: run for a limited time; everything that they started ends with them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from ...provenance import ROOT

_POLL_S = 0.5
# Runs a command that the kernel kills when this process dies, by whatever signal: a command that ran on alone would
# hold the GPU while the next one is measured.
_BOUND = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execvp(sys.argv[1], sys.argv[1:])"


def install(scratch: Path) -> dict[str, str]:
    """Makes the package importable by this Python: installed by pip without network, else through PYTHONPATH.

    Returns how, in words, and the PYTHONPATH to run with.
    """
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    target = scratch / "site"
    done = subprocess.run([*pip, "--target", target, ROOT], capture_output=True, text=True)
    how = "pip install --no-index --no-deps"
    if done.returncode:
        how = f"by PYTHONPATH, as pip said: {(done.stderr.strip().splitlines() or ['nothing'])[-1]}"
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        for installed, folder in (("odc_kernels", "kernels"), ("odc_bench", "bench")):
            (target / installed).symlink_to(ROOT / folder)
        (target / "odc_triton").symlink_to(ROOT / "odc_triton")
    return {"how": how, "path": str(target)}


def run(
    command: list[str], environment: dict[str, str], seconds: float, watch: Callable[[], None] = lambda: None
) -> tuple[int | None, str]:
    """The exit code, None if the time ran out, and all output. Everything that the command started has ended.

    `watch` is called twice a second meanwhile, and once at the end.
    """
    deadline_s = time.monotonic() + seconds
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", _BOUND, *command],
            cwd=ROOT,
            env=environment,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code: int | None = None
        while code is None and (left_s := deadline_s - time.monotonic()) > 0:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(min(_POLL_S, left_s))
            watch()
        if code is None:
            # A test's ranks are in other process groups, but in this session.
            for pid in _of_session(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
        watch()
        said.seek(0)
        return code, said.read()


def _of_session(session: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if os.getsid(int(entry.name)) == session:
                found.append(int(entry.name))
    return found
