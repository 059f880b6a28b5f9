"""The launcher's store: what torch asks of one, a deadline for every answer, and nobody else's word."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from datetime import timedelta
from multiprocessing.connection import Connection
from unittest import mock

import psutil
import pytest
import torch.distributed as dist

from odc_triton.base.errors import RankLost
from odc_triton.comm.barrier import Barrier
from odc_triton.comm.local_store import LocalStore, StoreServer
from odc_triton.comm.memory.rendezvous import listen, send_files
from odc_triton.jobs.launcher.launch import _store
from tests.support import leftovers, ranks
from tests.support.deadlines import LONG_S, SHORT_S
from tests.support.forks import fork


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
            store.set("text", "b")
            other = store.clone()
            given = [store.add("number", 2), other.add("number", -3), store.get("number"), other.multi_get(["text"])]
            given += [store.compare_set("text", "b", "c"), store.compare_set("text", "b", "d")]
            given += [store.compare_set("new", "x", "y"), store.compare_set("new", "", "z"), base.get("a/new")]
            given += [store.check(["text", "none"]), store.delete_key("text"), store.delete_key("text")]
            store.set_timeout(timedelta(seconds=SHORT_S / 5))
            for late in (lambda store=store: store.get("text"), lambda store=store: store.wait(["text", "number"])):
                with pytest.raises(dist.DistStoreError, match="wait timeout"):
                    late()
            with pytest.raises(dist.DistStoreError, match=r"wait timeout after (0\.1 s|100ms)"):
                store.wait(["none"], timedelta(seconds=0.1))
            store.set_timeout(timedelta(seconds=LONG_S))
            answers.append([*given, store.check(["number"])])
    assert answers[0] == answers[1]


def test_a_stopped_launcher_is_named() -> None:
    name = f"odc-test-{os.getpid()}"
    with listen(name, backlog=1):  # it takes connections and answers nothing
        store = LocalStore(name)
        store.set_timeout(timedelta(seconds=SHORT_S / 5))
        barrier = Barrier(store=store, rank=0, world=2, timeout_s=SHORT_S)
        with pytest.raises(RankLost, match=r"store does not answer \(the launcher is stopped: .* for 0\.3 s\)"):
            barrier.exchange("begin", {})


def test_what_waits_is_answered_and_the_dead_are_named() -> None:
    with _store() as name:
        store, late = LocalStore(name), LocalStore(name)
        setter = threading.Timer(0.1, lambda: late.set("key", "value"))
        setter.start()
        assert store.get("key") == b"value"
        setter.join()
        store.set_timeout(timedelta(seconds=SHORT_S / 5))
        answers = threading.Event()
        with mock.patch.object(StoreServer, "_add", side_effect=lambda *_: answers.wait(LONG_S)):
            with pytest.raises(dist.DistStoreError, match="the launcher is stopped"):
                store.add("number", 1)
            answers.set()
        store.set_timeout(timedelta(seconds=LONG_S))
        assert store.get("key") == b"value", "the late answer is no answer to this"
    with pytest.raises(dist.DistNetworkError, match="the launcher's store can't be reached"):
        store.clone().get("key")


def _turned_away() -> bytes:
    """What another user's process is answered, which asks as soon as there is a store, and what is in it then."""
    begun, name = os.pipe()
    stranger = fork()  # before the store has its thread
    if stranger == 0:
        asked, answer = os.read(begun, 100).decode(), b""
        os.setuid(65534)
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:  # it is hung up
            connection.connect(f"\0{asked}")
            Connection(os.dup(connection.fileno())).send(("set", "key", b"theirs"))
            answer = connection.recv(1)
        os._exit(len(answer))
    with _store() as store_name:
        store = LocalStore(store_name)
        store.set("key", "value")
        os.write(name, store_name.encode())
        assert os.waitstatus_to_exitcode(os.waitpid(stranger, 0)[1]) == 0
        return store.get("key")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_other_users_are_turned_away() -> None:
    assert ranks.in_own_process(_turned_away) == b"value"


def test_a_name_that_is_taken() -> None:
    with _store() as name:
        for take in (lambda: StoreServer(name), lambda: send_files([], token=name[4:], world=2, timeout_s=SHORT_S)):
            with pytest.raises(FileExistsError, match=f"has taken the socket @{name}.*ss -xlp"):
                take()
