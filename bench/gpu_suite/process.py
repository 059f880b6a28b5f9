"""Commands of the GPU suite: run for so long, and nothing that they started stays behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def install(scratch: Path) -> dict[str, str]:
    """Makes the package importable by this Python: installed by pip without network, else by a path of its own.

    Returns what it says about it, and the PYTHONPATH to run with.
    """
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    target = scratch / "site"
    done = subprocess.run([*pip, "--target", target, ROOT], capture_output=True, text=True)
    how = "pip install --no-index --no-deps"
    if done.returncode:
        how = f"by PYTHONPATH, as pip said: {(done.stderr.strip().splitlines() or ['nothing'])[-1]}"
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        (target / "odc_kernels").symlink_to(ROOT / "kernels")
        (target / "odc_triton").symlink_to(ROOT / "odc_triton")
    return {"how": how, "path": str(target)}


def run(command: list[str], environment: dict[str, str], seconds: float) -> tuple[int | None, str]:
    """The exit code, None where the time ran out, and all that was printed. Nothing that it started stays behind."""
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=said, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
            # Ranks of a test are in groups of their own, but of this session.
            for pid in _of_session(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
        said.seek(0)
        return code, said.read()


def _of_session(session: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if os.getsid(int(entry.name)) == session:
                found.append(int(entry.name))
    return found
