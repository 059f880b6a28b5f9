"""The launcher: what it returns, what it says when a rank fails, and that nothing outlives it."""

from __future__ import annotations

import atexit
import faulthandler
import mmap
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from odc_triton.jobs.launcher.launch import Interrupted, LocalRanks, RemoteTraceback, how_it_ended, launch
from tests.comm.launched import work
from tests.support import leftovers, slow
from tests.support.deadlines import LONG_S, SHORT_S, until
from tests.support.leftovers import environment
from tests.support.ranks import in_own_process


def test_returns_by_rank(tmp_path: Path) -> None:
    results = launch(work, "return", str(tmp_path), ranks=2)
    assert [result["rank"] for result in results] == [0, 1]
    assert all(result["sum"].item() == 3 for result in results)


def test_a_rank_that_exits(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    assert launch(work, "exits", str(tmp_path), ranks=2) == [{"rank": 0}, None]
    with pytest.raises(RuntimeError, match="rank 1 failed first: its process ended with status 1"):
        launch(work, "exits with a reason", str(tmp_path), ranks=2)
    assert "no data for it" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("raise", "rank 1 failed first: in two lines"),
        ("all raise", "no such data"),
        ("blames", "rank 1 failed first: the cause"),
        ("killed", "rank 1 failed first: its process was killed by SIGKILL"),
    ],
)
def test_root_cause_in_one_line(tmp_path: Path, what: str, words: str) -> None:
    start_s = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        launch(work, what, str(tmp_path), ranks=2)
    assert str(caught.value).startswith(words)
    assert "\n" not in str(caught.value)
    assert time.monotonic() - start_s < LONG_S / 2, "the other rank was told to end"
    assert isinstance(caught.value.__cause__, RemoteTraceback) == (what != "killed")
    assert not any(psutil.pid_exists(int(path.read_text())) for path in tmp_path.glob("rank-*"))


def test_signals_without_a_name() -> None:
    assert how_it_ended(-signal.SIGRTMIN - 3) == "its process was killed by signal 37"


@pytest.mark.parametrize(
    ("what", "number"),
    [
        ("stopped", signal.SIGTERM),  # the ranks agreed on it
        ("Ctrl-C", signal.SIGINT),  # one rank heard of it: the other is told
        ("Ctrl-C, blamed", signal.SIGINT),
    ],
)
def test_a_wish_to_stop(tmp_path: Path, what: str, number: int) -> None:
    with pytest.raises(Interrupted) as caught:
        launch(work, what, str(tmp_path), ranks=2)
    assert caught.value.signal == number


def test_a_failure_after_a_wish_to_stop(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="rank 0 failed first: no space"):
        launch(work, "Ctrl-C, and a failure", str(tmp_path), ranks=2)


def _late(how: str) -> None:
    if how == "stopped" and os.environ["RANK"] == "0":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "at exit":
        atexit.register(time.sleep, LONG_S)


def _failure(ranks: int, function: Callable, argument: object, timeout_s: float = LONG_S) -> str:
    """What is said of forked ranks that fail, in a process without threads."""
    with LocalRanks(ranks, method="fork") as job:
        job.start()
        try:
            job.run(function, argument, timeout_s=timeout_s)
        except RuntimeError as error:
            assert not job._running
            return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("how", "ranks", "words"),
    [
        ("stopped", 2, "rank 0 failed first: its process is stopped and has not ended"),
        slow("at exit", 1, "its process has not ended"),
    ],
)
def test_a_rank_that_does_not_end_is_named(how: str, ranks: int, words: str) -> None:
    """After the last barrier no rank waits for it."""
    said = in_own_process(_failure, ranks, _late, how, SHORT_S)
    assert f"{words} {SHORT_S:g} s after the first rank had done its work" in said


def _dies(given: tuple[signal.Signals, str]) -> None:
    how, file = given
    if os.environ["RANK"] == "0":
        return
    faulthandler.disable()  # pytest's
    if how is signal.SIGBUS:  # as when the data of a run, which all ranks map, are cut
        with open(file, "w+b") as data:
            data.truncate(mmap.PAGESIZE)
            mapped = mmap.mmap(data.fileno(), 0)
            data.truncate(0)
            mapped[0]
    os.kill(os.getpid(), how)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (signal.SIGBUS, r"SIGBUS \(a page of its memory could not be had: .* out of memory, .* was truncated"),
        (signal.SIGSEGV, r"SIGSEGV \(a crash in native code"),
        (signal.SIGABRT, r"SIGABRT \(native code gave up"),
        (signal.SIGILL, r"SIGILL \(torch used an instruction"),
    ],
)
def test_a_signal_is_explained(tmp_path: Path, how: signal.Signals, words: str) -> None:
    said = in_own_process(_failure, 2, _dies, (how, str(tmp_path / "data")))
    assert re.match(f"rank 1 failed first: its process was killed by {words}", said), said


_SCRIPT = """
import sys
from odc_triton.jobs.launcher.launch import Interrupted, launch
from tests.comm.launched import work
if __name__ == "__main__":
    try:
        launch(work, "wait", sys.argv[1], ranks=2)
    except Interrupted as wish:
        sys.exit(128 + wish.signal)
"""


def _is_starting(launcher: subprocess.Popen) -> bool:
    return any("spawn_main" in " ".join(each.cmdline()) for each in psutil.Process(launcher.pid).children())


def test_ctrl_c_while_ranks_start(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    found = leftovers.interrupted([sys.executable, str(script), str(tmp_path)], _is_starting)
    assert found == (128 + signal.SIGINT, "")


_WAITING = """
import sys, time
from odc_triton.jobs.launcher.launch import LocalRanks
if __name__ == "__main__":
    with LocalRanks(2, method=METHOD) as job:
        sys.path.insert(0, sys.argv[1])
        job.start(preload="writes_its_pid")
        time.sleep(600)
"""
_WRITES_ITS_PID = """
import os, pathlib
pathlib.Path(__file__).with_name(f"rank-{os.environ['RANK']}").write_text(str(os.getpid()))
"""


@pytest.mark.parametrize(
    "code",
    [slow(_SCRIPT), slow(_WAITING.replace("METHOD", "'spawn'")), _WAITING.replace("METHOD", "'fork'")],
    ids=["working", "waiting", "waiting, forked"],
)
def test_ranks_die_with_their_launcher(tmp_path: Path, code: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(code)
    (tmp_path / "writes_its_pid.py").write_text(_WRITES_ITS_PID)
    launcher = subprocess.Popen([sys.executable, str(script), str(tmp_path)], env=leftovers.environment())
    try:
        until(
            lambda: launcher.poll() is not None or sum(bool(each.read_text()) for each in tmp_path.glob("rank-*")) > 1
        )
        assert launcher.poll() is None
        pids = [int(path.read_text()) for path in tmp_path.glob("rank-*")]
        assert len(pids) == 2
        assert all(psutil.pid_exists(pid) for pid in pids)
    finally:
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
    until(lambda: not any(map(leftovers.is_running, pids)))


def test_a_closed_pipe_fails_no_rank_that_is_done():
    """Its output goes to `head`, which has ended."""
    code = """
import os
from odc_triton.jobs.launcher import launch
reads, writes = os.pipe()
os.dup2(writes, 1)
os.close(reads)
print("done")
launch.end_process(0)
"""
    buffered = environment() | {"PYTHONUNBUFFERED": ""}
    assert subprocess.run([sys.executable, "-c", code], env=buffered, timeout=LONG_S).returncode == 0


def test_exit_functions_are_not_waited_for():
    code = """
import atexit, time
from odc_triton.jobs.launcher import launch
launch._EXIT_S = 0.1
atexit.register(time.sleep, 600)
launch.end_process(7)
"""
    assert subprocess.run([sys.executable, "-c", code], env=environment(), timeout=LONG_S).returncode == 7
