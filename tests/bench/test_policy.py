"""What the measurements of a policy that is read count."""

from __future__ import annotations

import multiprocessing.dummy
import threading
from types import SimpleNamespace
from typing import Any

from bench.suites import policy
from bench.suites.policy import BESIDE, COPIES, NOBODY, ONE_READ, READS_ON, TINY
from odc_triton.policy.reader import PolicyReader
from tests.support import ranks


def _measured(rank: int, world: int, part: Any, *args: Any) -> Any:
    policy.PROCESSES = SimpleNamespace(Pipe=multiprocessing.dummy.Pipe, Process=threading.Thread)  # begins at once
    return part(*args)


def test_reads() -> None:
    reads = ranks.run(_measured, 2, policy.read_beside, PolicyReader, 50, 5, 3)[0]
    assert reads["reads"] >= 50
    assert reads["publications"] >= 5
    assert reads["met_a_publication"] >= 3
    assert reads["mixed"] == 0


def test_what_runs_beside_a_step() -> None:
    (found,) = ranks.run(_measured, 1, policy.step_beside, 2, TINY)
    done = {way: each["done_per_step"] for way, each in found["ways"].items()}
    assert tuple(done) == BESIDE
    assert (done[NOBODY], done[ONE_READ]) == (0, 1)
    assert min(done[READS_ON], done[COPIES]) > 0
    assert all(len(each["seconds"]) == 2 for each in found["ways"].values())
