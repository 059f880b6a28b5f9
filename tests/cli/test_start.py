"""How the command starts ranks: forked after the check; where there is a GPU, spawned before it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from odc_triton.cli import start
from tests.support import leftovers, slow, started
from tests.support.deadlines import LONG_S, SHORT_S


@pytest.mark.parametrize(
    ("has_gpu", "fault", "words"),
    [
        (False, "", None),
        (True, "", None),
        (False, "refused", "no such data"),
        (True, "refused, late", "no such data"),
        (False, "the check is killed", "its process was killed by SIGKILL"),
        (True, "an import kills", "rank 1 failed first: its process was killed by SIGKILL"),
        (True, "an import fails", "rank 1 failed first: no such library"),
        slow(False, "stopped", f"rank 0 failed first: its process is stopped and has not ended {SHORT_S:g} s after"),
    ],
)
def test_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_gpu: bool, fault: str, words: str | None) -> None:
    before = leftovers.names()
    monkeypatch.setattr(start, "_GPU_DEVICES", ("/",) if has_gpu else ())
    monkeypatch.setenv("ODC_TEST_START", fault)
    monkeypatch.setenv("ODC_TEST_FOLDER", str(tmp_path))
    timeout_s = SHORT_S if fault == "stopped" else LONG_S
    options = started.Options(fault=fault, folder=tmp_path, timeout_minutes=timeout_s / 60)
    if words is None:
        start.start_job(started.__name__, "run", options, ranks=2)
    else:
        with pytest.raises((RuntimeError, ValueError), match=words):
            start.start_job(started.__name__, "run", options, ranks=2)
    pids = {path.name: int(path.read_text()) for path in tmp_path.iterdir()}
    assert ("ran-0" in pids and "ran-1" in pids) == (words is None)
    assert ("imported-0" in pids and "imported-1" in pids) == has_gpu
    assert (pids["checked"] == os.getpid()) == has_gpu
    assert not [name for name, pid in pids.items() if pid != os.getpid() and psutil.pid_exists(pid)]
    leftovers.assert_none_since(before)


def test_a_world_of_another_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    options = started.Options(fault="", folder=Path(), timeout_minutes=1)
    with pytest.raises(
        ValueError, match=r"--ranks is 3, and this process is one of 2 that torchrun started .*leave --r"
    ):
        start.join_job(started.__name__, "run", options, ranks=3)
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(ValueError, match="RANK is '2' and WORLD_SIZE '2': set them as torchrun does"):
        start.join_job(started.__name__, "run", options, ranks=1)


def test_options_are_read_before_anything_is_imported() -> None:
    code = "from odc_triton.cli.command import make_parser; make_parser('train')"
    code += "; import sys; print({'numpy', 'torch', 'transformers'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=leftovers.environment())
    assert (done.stdout, done.stderr) == ("set()\n", "")
