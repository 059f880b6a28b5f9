"""What depends on whose memory an owner's rows lie in: the order of pulls, by simulated streams, and of additions."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch

from tests.support import place  # isort: skip

from odc_kernels.device import adds_in_bulk
from odc_kernels.linear import linear_ref
from odc_kernels.linear_cross_entropy import parts_of, pulled
from odc_kernels.linear_staged import linear_dx_staged, linear_staged
from odc_kernels.peers import ALL, PeerShards, shards_of
from odc_kernels.staged import StagedWeight, check, pull
from tests.support.simulated import SimulatedDevice

WORLD, ROWS, COLUMNS, CHUNK = 3, 24, 16, 3


def _peers(near: frozenset[int] | str | None = ALL, seed: int = 0) -> tuple[list[torch.Tensor], PeerShards]:
    shards = shards_of(torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed)), WORLD)
    return shards, PeerShards.of(shards, shape=(ROWS, COLUMNS), rank=1, near=near)


def test_others_are_far_unless_told() -> None:
    assert _peers(near=None)[1].far == [0, 2]
    assert _peers(near=ALL)[1].far == []
    assert PeerShards.local(torch.zeros(2, 3)).far == []
    for wrong in ("most", [3], [-1]):
        with pytest.raises(ValueError, match=r"near is .*; give owners of 0\.\.2, or ALL"):
            _peers(near=wrong)


@pytest.mark.skipif(not place.INTERPRETED, reason="the simulated device is a CPU")
def test_a_kernel_finds_the_rows_of_near_owners() -> None:
    """All are near, and copies are late: a kernel's wait for flags would time out."""
    device, (shards, peers) = SimulatedDevice(), _peers()
    x, y = torch.randn(4, COLUMNS), torch.full((4, ROWS), torch.nan)
    weight = pull(peers=peers, staged=StagedWeight.of(peers, on=device))
    linear_staged(x=x, weight=weight, out=y, spins=3)
    check(weight)
    # fp32: a sum of 16 terms in another order.
    torch.testing.assert_close(y.double(), linear_ref(x, shards, None), rtol=1e-5, atol=1e-5)


def test_only_the_rows_of_near_owners_are_waited_for() -> None:
    device, (shards, peers) = SimulatedDevice(), _peers(near=frozenset({1, 2}))
    assert peers.far == [0]
    weight = pull(peers=peers, staged=StagedWeight.of(peers, on=device))
    assert weight.flags.tolist() == [0, 1, 1]
    assert torch.equal(weight.buffer[8:], torch.cat(shards[1:]))
    assert weight.has_far
    assert device.has_come(weight.stream.record_event())
    assert weight.flags.tolist() == [1, 1, 1]
    assert torch.equal(weight.buffer, torch.cat(shards))


@pytest.mark.skipif(not place.INTERPRETED, reason="the simulated device is a CPU")
def test_a_flag_of_the_pull_before_is_not_taken_for_this_one() -> None:
    """After the last epoch comes the first: larger numbers are older then."""
    device, (_, peers) = SimulatedDevice(), _peers(near=None)  # this rank alone
    last = replace(StagedWeight.of(peers, on=device), epoch=2**31 - 1)
    last.flags.fill_(last.epoch)
    weight, x, y = pull(peers=peers, staged=last), torch.ones(2, COLUMNS), torch.zeros(2, ROWS)
    assert weight.epoch == 1
    linear_staged(x=x, weight=weight, out=y, spins=2)  # far owners' copies are late
    assert y.isnan()[0].tolist() == [True] * 8 + [False] * 8 + [True] * 8
    with pytest.raises(TimeoutError):
        check(weight)


@pytest.mark.parametrize("near", [ALL, None])
def test_a_buffer_is_filled_again_after_it_was_read(near: str | None) -> None:
    device, (shards, peers), (_, others) = SimulatedDevice(), _peers(near), _peers(near, seed=1)
    weight, read = pull(peers=peers, staged=StagedWeight.of(peers, on=device)), []
    assert device.has_come(weight.stream.record_event())
    device.enqueue(device.current(), lambda: read.append(weight.buffer.clone()))  # a kernel
    weight.is_read_now()
    weight = pull(peers=others, staged=weight)
    assert device.has_come(weight.stream.record_event())
    assert device.has_come(device.current().record_event())
    assert torch.equal(read[0], torch.cat(shards))
    assert torch.equal(weight.buffer, torch.cat(others.shards))


def test_a_buffer_is_filled_after_it_was_made() -> None:
    device, (_, peers), done = SimulatedDevice(), _peers(near=None), []
    device.enqueue(device.current(), lambda: done.append("zeros"))
    weight = pull(peers=peers, staged=StagedWeight.of(peers, on=device))
    assert device.has_come(weight.stream.record_event())
    assert done == ["zeros"]


@pytest.mark.skipif(not place.INTERPRETED, reason="the simulated device is a CPU")
@pytest.mark.parametrize("kernel", ["product", "gradient"])
def test_a_buffer_is_filled_again_after_a_kernel_has_read_it(kernel: str) -> None:
    device, (_, peers), done = SimulatedDevice(), _peers(), []
    weight = pull(peers=peers, staged=StagedWeight.of(peers, on=device))
    device.enqueue(device.current(), lambda: done.append(kernel))
    if kernel == "product":
        linear_staged(x=torch.ones(2, COLUMNS), weight=weight, out=torch.empty(2, ROWS))
    else:
        linear_dx_staged(dy=torch.ones(2, ROWS), weight=weight, out=torch.empty(2, COLUMNS))
    weight = pull(peers=peers, staged=weight)
    assert device.has_come(weight.stream.record_event())
    assert done == [kernel]


@pytest.mark.parametrize(("kind", "reads_late"), [("late", False), ("late", True), ("early", True)])
def test_the_heads_parts_come_before_they_are_read_and_stay_till_then(kind: str, reads_late: bool) -> None:
    device, (_, peers) = SimulatedDevice(kind), _peers()
    read: list[torch.Tensor] = []
    for _, rows in pulled(peers, parts_of(peers, CHUNK), CHUNK, on=device):
        if reads_late:  # as a kernel
            device.enqueue(device.current(), lambda rows=rows: read.append(rows.clone()))
        else:
            read.append(rows.clone())
    assert device.has_come(device.current().record_event())
    parts = parts_of(peers, CHUNK)
    assert len(read) == len(parts) > WORLD
    for rows, part in zip(read, parts, strict=True):
        assert torch.equal(rows, peers.shards[part.owner][part.start : part.stop])


def test_the_heads_buffers_are_freed_after_the_last_copy() -> None:
    device, (_, peers) = SimulatedDevice(), _peers()
    parts = pulled(peers, parts_of(peers, CHUNK), CHUNK, on=device)
    for _ in range(4):  # the own rows, and the first of the next owner's
        next(parts)
    pulls = device.streams[-1]
    assert pulls.done < pulls.enqueued
    parts.close()
    gc.collect()
    assert pulls.done == pulls.enqueued


@pytest.mark.parametrize(
    ("told", "near", "expected"),
    [
        (None, ALL, True),
        (None, frozenset({0, 1, 2}), True),
        (None, None, False),
        ("auto", frozenset({1}), False),
        ("on", frozenset({1}), True),
        ("off", ALL, False),
    ],
)
def test_bulk_reductions(
    told: str | None, near: frozenset[int] | str | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if told is None:
        monkeypatch.delenv("ODC_BULK_REDUCTIONS", raising=False)
    else:
        monkeypatch.setenv("ODC_BULK_REDUCTIONS", told)
    assert adds_in_bulk(_peers(near)[1]) is expected
