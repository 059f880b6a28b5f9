"""How the command starts ranks: forked after the check; where there is a GPU, spawned before it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from odc_triton.base.environment import joined_world, require_world
from odc_triton.tools.cli import start
from tests.support import leftovers, slow, started
from tests.support.deadlines import LONG_S, SHORT_S
from tests.support.ranks import in_own_process


def _start(has_gpu: bool, options: started.Options) -> tuple[str | None, int]:
    """What is said of ranks that don't start, and the launcher's process: one without threads, as ranks are forked."""
    start._GPU_DEVICES = ("/",) if has_gpu else ()
    os.environ.update(ODC_TEST_START=options.fault, ODC_TEST_FOLDER=str(options.folder))
    try:
        start.start_job(started.__name__, "run", options, ranks=2)
    except (RuntimeError, ValueError) as error:
        return str(error), os.getpid()
    return None, os.getpid()


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
def test_start(tmp_path: Path, has_gpu: bool, fault: str, words: str | None) -> None:
    before = leftovers.names()
    timeout_s = SHORT_S if fault == "stopped" else LONG_S
    options = started.Options(fault=fault, folder=tmp_path, timeout_minutes=timeout_s / 60)
    said, launcher = in_own_process(_start, has_gpu, options)
    assert said is None if words is None else words in said
    pids = {path.name: int(path.read_text()) for path in tmp_path.iterdir()}
    assert ("ran-0" in pids and "ran-1" in pids) == (words is None)
    assert ("imported-0" in pids and "imported-1" in pids) == has_gpu
    assert (pids["checked"] == launcher) == has_gpu
    assert not [name for name, pid in pids.items() if psutil.pid_exists(pid)]
    leftovers.assert_none_since(before)


@pytest.mark.parametrize(
    ("device", "has_gpu", "gpus", "want"),
    [("auto", True, 8, 8), ("cuda", True, 8, 8), ("cpu", True, 8, 1), ("auto", False, 8, 1), ("auto", True, 0, 1)],
)
def test_ranks_by_default(monkeypatch: pytest.MonkeyPatch, device: str, has_gpu: bool, gpus: int, want: int) -> None:
    monkeypatch.setattr(start, "_GPU_DEVICES", ("/",) if has_gpu else ())
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    assert start.default_ranks(device) == want


def test_a_world_is_joined_if_it_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun's; not the one of each pod that an operator of clusters announces."""
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    assert joined_world() is None
    set_all = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "host"}
    for name, value in set_all.items():
        monkeypatch.setenv(name, value)
    assert joined_world() is None
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert joined_world() == 2
    require_world(None, 2)
    with pytest.raises(ValueError, match=r"--ranks is 3, and this process is one of 2 ranks.*leave --ranks out"):
        require_world(3, 2)
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(ValueError, match=r"RANK is '2', WORLD_SIZE '2' .*start this by torchrun"):
        joined_world()


def test_options_are_read_before_anything_is_imported() -> None:
    code = "from odc_triton.tools.cli.command import make_parser; make_parser('train')"
    code += "; import sys; print({'numpy', 'torch', 'transformers'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=leftovers.environment())
    assert (done.stdout, done.stderr) == ("set()\n", "")
