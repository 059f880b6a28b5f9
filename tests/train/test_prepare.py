"""Rank 0 prepares the data: it takes longer than the deadline, fails, dies or is stopped."""

from __future__ import annotations

import os
import re
import shlex
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from odc_triton import OdcError
from odc_triton.comm import barrier as barrier_module
from odc_triton.comm.barrier import Barrier
from odc_triton.comm.grid import Grid
from odc_triton.jobs.data.records import DataError
from odc_triton.jobs.train import prepare, sft
from odc_triton.jobs.train.sft_options import SftOptions
from odc_triton.sharding.agree import default_mesh, watched_barrier
from tests.support import ranks, slow
from tests.support.deadlines import LONG_S, SHORT_S
from tests.support.sft_case import case, write_case

_WAITED = "longer than two deadlines"


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


class _Clock:
    """Goes on by most of a deadline with each sign of rank 0, so no result depends on how often rank 0 can make one."""

    def __init__(self, barrier: Barrier) -> None:
        self._barrier, self._sign, self._now_s = barrier, 0, 0.0

    def monotonic(self) -> float:
        return self._now_s

    def sleep(self, _: float) -> None:
        time.sleep(0.001)
        self._now_s += 0.001
        if (sign := self._barrier._signs.seen()[0]) != self._sign:
            self._sign = sign
            self._now_s += 0.7 * LONG_S
            if self._now_s > 2 * LONG_S:
                _store().set(_WAITED, "")


@contextmanager
def _on_that_clock(grid: Grid, timeout: timedelta) -> Iterator[Barrier]:
    with watched_barrier(grid, timeout) as barrier, mock.patch.object(barrier_module, "time", _Clock(barrier)):
        yield barrier


@contextmanager
def _with_a_short_deadline(grid: Grid, timeout: timedelta) -> Iterator[Barrier]:
    """Of LONG_S, once the ranks are connected."""
    with watched_barrier(grid, timeout) as barrier:
        barrier.timeout_s *= SHORT_S / LONG_S
        yield barrier


def _error_of(wanted: SftOptions, mesh: dist.device_mesh.DeviceMesh) -> tuple[str, list[int], str]:
    try:
        sft.prepare(wanted, mesh=mesh)
    except (OdcError, DataError) as error:
        return type(error).__name__, getattr(error, "ranks", []), str(error)
    return "no error", [], ""


def _makes_signs() -> bool:
    return any(thread.name == "odc-signs" for thread in threading.enumerate())


def _prepare(rank: int, world: int, wanted: SftOptions) -> tuple:
    """How many samples there are after a long preparation; what the others learn of one that fails, and of one in which
    rank 0 dies.
    """
    mesh = default_mesh(timedelta(seconds=LONG_S), "cpu", replicas=wanted.replicas)
    tokenize = sft.tokenize

    def slowly(*given: object) -> list[Path]:
        assert _makes_signs()
        _store().wait([_WAITED], timedelta(seconds=LONG_S))
        return tokenize(*given)

    def dies(*given: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    watched = _on_that_clock if rank == 1 else watched_barrier
    with mock.patch.object(sft, "tokenize", slowly), mock.patch.object(prepare, "watched_barrier", watched):
        prepared = sft.prepare(wanted, mesh=mesh)
    if prepared.folder is not None:
        prepared.folder.release()
    assert not _makes_signs()
    with mock.patch.object(sft, "tokenize", side_effect=DataError("line 7 is damaged")):
        failed = _error_of(wanted, mesh)
    assert not _makes_signs()
    with mock.patch.object(sft, "tokenize", dies):
        return len(prepared.data), failed, _error_of(wanted, mesh)


def test_a_long_preparation_is_waited_for_and_a_death_in_it_has_a_name(tmp_path: Path) -> None:
    wanted = case(write_case(tmp_path), timeout_minutes=LONG_S / 60, samples_per_rank=2)
    with ranks.start(_prepare, 2, wanted) as job:
        first, second = job.join()
    assert first.signal == signal.SIGKILL, first.error
    assert second.error is None, second.error
    samples, failed, (kind, blamed, words) = second.value
    assert samples == 40
    assert failed == ("DataError", [], "line 7 is damaged")
    assert (kind, blamed) == ("RankLost", [0])
    assert words.startswith("rank 1 was waiting for 'rank 0 prepares the data': rank 0 died")


def test_the_command_in_run_yaml_works_for_a_folder_with_spaces(tmp_path: Path) -> None:
    wanted = case(write_case(tmp_path), out=str(tmp_path / "my run"))
    mesh = default_mesh(timedelta(seconds=LONG_S), "cpu")
    with prepare.take_folder(wanted, lambda _: {"prepared": []}, mesh=mesh) as (_, folder):
        assert folder is not None
        path = folder.file(prepare.CONFIG)
        command = " ".join(re.findall(r"^# ?(.*)", path.read_text(), re.M)).partition("again: ")[2]
        folder.release()
    assert shlex.split(command)[:5] == ["odc-triton", "train", "sft", "--config", str(path)]


def _stopped(rank: int, world: int, wanted: SftOptions) -> tuple[str, list[int], str]:
    mesh = default_mesh(timedelta(seconds=LONG_S), "cpu", replicas=wanted.replicas)

    def stops(*given: object) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    with (
        mock.patch.object(sft, "tokenize", stops),
        mock.patch.object(prepare, "watched_barrier", _with_a_short_deadline),
    ):
        return _error_of(wanted, mesh)


@pytest.mark.parametrize("replicas", [slow(1), 2])
def test_a_rank_0_that_is_stopped_in_it_has_a_name(tmp_path: Path, replicas: int) -> None:
    wanted = case(write_case(tmp_path), timeout_minutes=LONG_S / 60, samples_per_rank=2, replicas=replicas)
    with ranks.start(_stopped, 2, wanted) as job:
        (second,) = job.wait_for([1])
    assert second.error is None, second.error
    kind, blamed, words = second.value
    assert (kind, blamed) == ("DeadlineExceeded", [0])
    assert "for rank 0 at 'rank 0 prepares the data'" in words
    assert "with no sign of life for " in words
