"""Rank 0 prepares the data: for longer than the run's deadline, it says how far it is, and it dies while it does."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch.distributed as dist

from odc_triton.sharding.agree import default_mesh
from odc_triton.train import sft
from odc_triton.train.sft_options import SftOptions
from tests.support import ranks
from tests.support.deadlines import SHORT_S
from tests.support.sft_case import case, write_case


def _prepare(rank: int, world: int, wanted: SftOptions) -> tuple[int, list[str], str]:
    """How many samples there are after a long preparation; and what the others learn of one in which rank 0 died."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=SHORT_S), dist.group.WORLD)
    mesh = default_mesh(timedelta(seconds=SHORT_S), "cpu", replicas=wanted.replicas)
    tokenize = sft._tokenize

    def slowly(*given: object) -> list[Path]:
        time.sleep(1.5 * SHORT_S)
        return tokenize(*given)

    def dies(*given: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with mock.patch.object(sft, "_tokenize", slowly):
        prepared = sft.prepare(wanted, mesh=mesh)
    if prepared.folder is not None:
        prepared.folder.release()
    with mock.patch.object(sft, "_tokenize", dies):
        try:
            sft.prepare(wanted, mesh=mesh)
        except RuntimeError as error:
            return len(prepared.data), getattr(error, "ranks", []), str(error)
    return len(prepared.data), [], "no error"


def test_a_long_preparation_is_waited_for_and_a_death_in_it_has_a_name(tmp_path: Path) -> None:
    wanted = case(write_case(tmp_path), timeout_minutes=SHORT_S / 60, samples_per_rank=2)
    with ranks.start(_prepare, 2, wanted) as job:
        first, second = job.join()
    assert first.signal == signal.SIGKILL, first.error
    assert second.error is None, second.error
    samples, blamed, words = second.value
    assert samples == 40
    assert blamed == [0]
    assert words.startswith("rank 1 was waiting for 'rank 0 prepares the data': rank 0 died")
