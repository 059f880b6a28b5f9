"""The launcher: what it returns, what it says when a rank fails, and that nothing outlives it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from unittest import mock

import psutil
import pytest
import torch.distributed as dist

from odc_triton.launch import Interrupted, RemoteTraceback, _store, launch
from odc_triton.local_store import LocalStore, StoreServer
from odc_triton.memory.rendezvous import send_files

from . import leftovers


def _work(what: str, folder: str) -> dict:
    rank = int(os.environ["RANK"])
    Path(folder, f"rank-{rank}").write_text(str(os.getpid()))
    if what == "return":
        import torch
        import torch.distributed as dist

        from odc_triton.local_store import rendezvous_url

        dist.init_process_group("gloo", rendezvous_url())
        total = torch.tensor([rank + 1.0])
        dist.all_reduce(total)
        dist.destroy_process_group()
        return {"rank": rank, "sum": total}
    if what == "raise" and rank == 1:
        raise ValueError("in two\nlines")
    if what == "all raise":
        while len(list(Path(folder).glob("rank-*"))) < 2:  # a rank that starts much later would be told to end
            time.sleep(0.01)
        raise OSError("no such data")
    if what == "blames" and rank == 0:
        from odc_triton.errors import RankLost

        raise RankLost([1], "rank 1 died")
    if what == "blames":
        time.sleep(0.5)
        raise ValueError("the cause")
    if what == "killed" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "stopped":
        sys.exit(128 + signal.SIGTERM)
    time.sleep(60)
    return {}


def test_returns_by_rank(tmp_path: Path) -> None:
    results = launch(_work, "return", str(tmp_path), ranks=3)
    assert [result["rank"] for result in results] == [0, 1, 2]
    assert all(result["sum"].item() == 6 for result in results)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("raise", "rank 1 failed first: ValueError: in two lines"),
        ("all raise", "OSError: no such data"),
        ("blames", "rank 1 failed first: ValueError: the cause"),
        ("killed", "rank 1 failed first: its process was killed by SIGKILL"),
    ],
)
def test_root_cause_in_one_line(tmp_path: Path, what: str, words: str) -> None:
    start_s = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        launch(_work, what, str(tmp_path), ranks=2)
    assert str(caught.value).startswith(words)
    assert "\n" not in str(caught.value)
    assert time.monotonic() - start_s < 50, "the other rank was told to end"
    assert isinstance(caught.value.__cause__, RemoteTraceback) == (what != "killed")
    assert not any(psutil.pid_exists(int(path.read_text())) for path in tmp_path.glob("rank-*"))


def test_a_wish_that_the_ranks_agreed_on(tmp_path: Path) -> None:
    with pytest.raises(Interrupted) as caught:
        launch(_work, "stopped", str(tmp_path), ranks=2)
    assert caught.value.signal == signal.SIGTERM


_SCRIPT = """
import sys
from odc_triton.launch import launch
from tests.test_launch import _work
if __name__ == "__main__":
    launch(_work, "wait", sys.argv[1], ranks=2)
"""


def test_ranks_die_with_their_launcher(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    launcher = subprocess.Popen([sys.executable, str(script), str(tmp_path)], env=environment)
    try:
        deadline_s = time.monotonic() + 100
        while len(files := list(tmp_path.glob("rank-*"))) < 2 or not all(path.read_text() for path in files):
            assert launcher.poll() is None
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        pids = [int(path.read_text()) for path in files]
        assert all(psutil.pid_exists(pid) for pid in pids)
    finally:
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
    deadline_s = time.monotonic() + 5
    while alive := [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]:
        assert time.monotonic() < deadline_s, f"ranks {alive} outlive their launcher"
        time.sleep(0.05)


# ---------------------------------------------------------------------- the store


def _sockets() -> list[object]:
    return [each.laddr for each in psutil.Process().net_connections("inet")]


def test_the_launcher_opens_no_port() -> None:
    before, names = _sockets(), leftovers.names()
    with _store() as name:
        assert f"@{name}" in leftovers.names() - names
        assert _sockets() == before
    assert f"@{name}" not in leftovers.names()


def test_the_store_is_as_tcps() -> None:
    """Every call that torch and this package make, below a PrefixStore as both make them."""
    with _store() as name:
        answers = []
        for base in (dist.TCPStore("127.0.0.1", 0, None, True), LocalStore(name)):
            store = dist.PrefixStore("a", base)
            store.set_timeout(timedelta(seconds=0.2))
            store.set("text", "b")
            other = store.clone()
            given = [store.add("number", 2), other.add("number", -3), store.get("number"), other.multi_get(["text"])]
            given += [store.compare_set("text", "b", "c"), store.compare_set("text", "b", "d")]
            given += [store.compare_set("new", "x", "y"), store.compare_set("new", "", "z"), base.get("a/new")]
            given += [store.check(["text", "none"]), store.delete_key("text"), store.delete_key("text")]
            for late in (lambda store=store: store.get("text"), lambda store=store: store.wait(["text", "number"])):
                with pytest.raises(dist.DistStoreError, match="wait timeout"):
                    late()
            answers.append([*given, store.check(["number"])])
    assert answers[0] == answers[1]


def test_what_waits_is_answered_and_the_dead_are_named() -> None:
    with _store() as name:
        store, late = LocalStore(name), LocalStore(name)
        setter = threading.Timer(0.1, lambda: late.set("key", "value"))
        setter.start()
        assert store.get("key") == b"value"
        setter.join()
        store.set_timeout(timedelta(seconds=0.2))
        with mock.patch.object(StoreServer, "_add", side_effect=lambda *_: time.sleep(0.6)):
            with pytest.raises(dist.DistStoreError, match="the launcher is stopped"):
                store.add("number", 1)
        assert store.get("key") == b"value", "the late answer is no answer to this"
    with pytest.raises(dist.DistNetworkError, match="the launcher's store can't be reached"):
        store.clone().get("key")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_other_users_are_turned_away() -> None:
    with _store() as name:
        store = LocalStore(name)
        store.set("key", "value")
        stranger = os.fork()
        if stranger == 0:
            os.setuid(65534)
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(f"\0{name}")
                with contextlib.suppress(OSError):
                    Connection(os.dup(connection.fileno())).send(("set", "key", "theirs"))
                os._exit(len(connection.recv(1)))
        assert os.waitstatus_to_exitcode(os.waitpid(stranger, 0)[1]) == 0
        assert store.get("key") == b"value"


def test_a_name_that_is_taken() -> None:
    with _store() as name:
        for take in (lambda: StoreServer(name), lambda: send_files([], token=name[4:], world=2, timeout_s=1)):
            with pytest.raises(FileExistsError, match=f"has taken the socket @{name}.*ss -xlp"):
                take()


def test_more_ranks_than_cores(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from odc_triton.launch import warn_of_few_cores

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cores = len(os.sched_getaffinity(0))
    warn_of_few_cores(cores)
    assert capfd.readouterr().err == ""
    warn_of_few_cores(cores + 1)
    assert f"{cores + 1} ranks share {cores} cores" in capfd.readouterr().err
