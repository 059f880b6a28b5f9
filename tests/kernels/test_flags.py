"""Flags that kernels set and await, and blocks that they add to a peer's memory."""

from __future__ import annotations

import threading

import pytest
import torch

from tests.support import place  # isort: skip

from odc_kernels.flags import await_flags, set_flags
from odc_kernels.scatter import add_block

pytestmark = place.MARKS
RANKS, PLACES = 35, 4  # more ranks than one launch has bits


def test_only_the_named_ranks_flags_are_set() -> None:
    flags = [torch.zeros(PLACES, dtype=torch.int64) for _ in range(RANKS)]
    table = torch.tensor([each.data_ptr() for each in flags])
    wanted = {0, 3, 15, 16, 34}
    set_flags(table=table, ranks=wanted, place=2, value=2**40)
    for rank, each in enumerate(flags):
        assert each.tolist() == [0, 0, 2**40 if rank in wanted else 0, 0]
    set_flags(table=table, ranks=(), place=0, value=1)
    assert not any(each[0] for each in flags)


@pytest.mark.parametrize(
    ("missing", "stop", "number", "status"),
    [
        (None, 0, 4, 0),
        (2, 0, 4, 4),  # one of the awaited flags is one too small
        (20, 0, 4, 4),
        (5, 0, 4, 0),  # nobody waits for it
        (None, 1, 4, 0),  # stopped, but there is nothing left to wait for
        (2, 1, 4, 4),
    ],
)
def test_a_wait_ends(missing: int | None, stop: int, number: int, status: int) -> None:
    flags, found = torch.zeros(RANKS, PLACES, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    flags[:, 1] = 7
    if missing is not None:
        flags[missing, 1] = 6
    given = {"flags": flags, "place": 1, "value": 7, "stop": torch.tensor([stop], dtype=torch.int32)}
    # A stopped wait must not spin, so its many spins would take hours.
    await_flags(**given, ranks=(0, 2, 20, 34), status=found, number=number, spins=2**31 if stop else 5)
    assert int(found) == status
    flags[:, 1] = 0
    await_flags(**given, ranks=(0,), status=found, number=9, spins=2)
    assert int(found) == (status or 9), "the first wait that timed out is the one to name"


def test_the_host_stops_a_wait_that_has_begun() -> None:
    flags, found = torch.zeros(1, PLACES, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    # As in sequence/sync.py: what is set on the device itself would queue behind the kernel that waits for it.
    stop = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=not place.INTERPRETED)
    given = {"flags": flags, "ranks": (0,), "place": 1, "stop": stop, "status": found, "number": 4, "spins": 2**31}
    await_flags(**given, value=0)  # loads the kernel; there is nothing to wait for
    assert int(found) == 0
    host = threading.Timer(0.05, lambda: stop.__setitem__(0, 1))
    host.start()
    await_flags(**given, value=7)
    assert int(found) == 4
    host.join()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(3, 2, 8), (1, 1, 5), (0, 2, 8), (70, 2, 8)])
def test_a_block_is_added(shape: tuple, dtype: torch.dtype) -> None:
    room = torch.randn(100, *shape[1:])
    want, source = room.clone(), torch.randn(shape).to(dtype)
    target = room[7 : 7 + shape[0]]
    want[7 : 7 + shape[0]] += source.float()
    add_block(target=target, source=source, block=64)
    assert torch.equal(room, want)  # one sum per element
