"""The order of a device's work, by a simulated device that does everything as late, or as early, as it may."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from odc_triton.base.errors import DeadlineExceeded
from odc_triton.comm.layout import ParameterSpec
from odc_triton.engine.gathered import GatheredParameters
from odc_triton.engine.transport import AllStreams, Copies, DeviceStreams, Streams
from tests.support.simulated import SimulatedDevice, SimulatedEvent

KINDS = pytest.mark.parametrize("kind", ["late", "early"])


class Setup:
    """Streams of a simulated device; a buffer of four ones; what `read` found in it."""

    def __init__(self, kind: str, **options: int) -> None:
        self.device = SimulatedDevice(kind)
        self.streams = DeviceStreams(self.device, **options)
        self.buffer, self.found = torch.ones(4), []
        self.storage = self.buffer.untyped_storage()

    def read(self) -> None:
        self.found.append(self.buffer.tolist())

    def copy(self, value: float) -> Copies:
        """Fills the buffer, each half on a stream of its own."""
        return self.streams.copy(self.storage, *(partial(half.fill_, value) for half in self.buffer.data.split(2)))

    def drain(self) -> None:
        self.streams.drain(1.0, "a test")


@KINDS
def test_copies_follow_what_is_computed_before(kind: str) -> None:
    it = Setup(kind)
    it.streams.compute(it.read)
    it.streams.wait(it.copy(2.0))
    it.read()
    assert it.found == [[1.0] * 4, [2.0] * 4]


def test_copies_come_when_they_are_waited_for() -> None:
    it = Setup("late")
    copies = it.copy(2.0)
    it.read()
    it.streams.wait(copies)
    it.read()
    assert it.found == [[1.0] * 4, [2.0] * 4]


@KINDS
def test_every_stream_waits_for_copies_once(kind: str) -> None:
    it = Setup(kind)
    other = it.device.stream()
    copies = it.copy(2.0)
    it.streams.wait(copies)
    with it.device.computing_on(other):
        assert not any(done.stream in other.followed for done in copies.done)
        it.streams.wait(copies)
        assert all(done.stream in other.followed for done in copies.done)
    assert len(copies.users) == 2


@KINDS
def test_memory_is_freed_after_the_copies_into_it(kind: str) -> None:
    it = Setup(kind)
    copies = it.copy(2.0)
    it.streams.free(it.storage, copies)  # nobody has waited for them
    it.drain()
    assert it.storage.nbytes() == 0


@KINDS
def test_memory_is_freed_after_all_streams_have_used_it(kind: str) -> None:
    it = Setup(kind)
    other = it.device.stream()
    copies = it.copy(2.0)
    with it.device.computing_on(other):
        it.streams.wait(copies)
        it.device.enqueue(other, it.read, it.storage)
    it.streams.free(it.storage, copies)
    it.drain()
    assert it.found == [[2.0] * 4]


@KINDS
@pytest.mark.parametrize("in_flight_bytes", [2**20, 40], ids=["all", "two"])
def test_gradients_live_until_they_are_added(kind: str, in_flight_bytes: int) -> None:
    it = Setup(kind, in_flight_bytes=in_flight_bytes)
    for value in range(5):
        it.streams.compute(lambda: None)
        it.streams.add(torch.full((4,), float(value)), it.buffer.add_)
    if kind == "late":  # of 16 bytes each, as many as are over the limit had to be waited for
        assert it.buffer[0].item() == (1 if in_flight_bytes > 40 else 1 + 0 + 1 + 2)
    it.drain()
    assert it.buffer.tolist() == [1.0 + 0 + 1 + 2 + 3 + 4] * 4


@KINDS
def test_drained_gradients_are_not_in_flight(kind: str) -> None:
    it = Setup(kind, in_flight_bytes=40)
    for before in (1.0, 3.0, 5.0):
        for _ in range(2):  # of 16 bytes each
            it.streams.add(torch.ones(4), it.buffer.add_)
        if kind == "late":
            assert it.buffer.tolist() == [before] * 4, "there was room for both"
        it.drain()
        assert it.buffer.tolist() == [before + 2] * 4


@KINDS
def test_additions_follow_what_is_computed_before(kind: str) -> None:
    it = Setup(kind)
    gradient = torch.full((4,), torch.nan)
    it.streams.compute(lambda: gradient.fill_(3.0))
    it.streams.add(gradient, it.buffer.add_)
    it.drain()
    assert it.buffer.tolist() == [4.0] * 4


@KINDS
def test_what_follows_additions_is_done_after_them(kind: str) -> None:
    it = Setup(kind)
    it.streams.add(torch.ones(4), it.buffer.add_)
    it.streams.after_adds(it.read)
    it.drain()
    assert it.found == [[2.0] * 4]


def test_additions_are_made_before_a_wait_for_peers() -> None:
    it = Setup("late")
    it.streams.add(torch.ones(4), it.buffer.add_)
    it.streams.go_on()
    assert it.buffer.tolist() == [2.0] * 4


@KINDS
def test_drained_are_all_streams_on_which_something_was_computed(kind: str) -> None:
    it = Setup(kind)
    for _ in range(2):
        other = it.device.stream()
        with it.device.computing_on(other):
            it.streams.computes_here()
            it.device.enqueue(other, it.read, it.storage)
    copies = it.copy(2.0)
    it.streams.compute(it.read)
    it.drain()
    assert all(done.query() for done in copies.done)
    assert sorted(it.found) == [[1.0] * 4] * 2 + [[1.0 if kind == "late" else 2.0] * 4]


def test_a_drain_reports_what_waited_in_vain_on_streams_that_joined() -> None:
    def check() -> None:
        raise DeadlineExceeded([1], "a kernel's wait timed out")

    streams, others = (AllStreams(Streams(), timeout_s=1.0) for _ in range(2))
    others.watch(SimpleNamespace(check=check))
    streams.join(others)
    with pytest.raises(DeadlineExceeded, match="timed out"):
        streams.drain("a test")


class _Stuck(SimulatedDevice):
    def has_come(self, event: SimulatedEvent) -> bool:
        return False


def test_a_device_that_does_not_end_is_named() -> None:
    streams = DeviceStreams(_Stuck())
    with pytest.raises(DeadlineExceeded, match=r"simulated device \(late\) was still busy after 0.1 s: reading"):
        streams.drain(0.1, "reading")


def _gathered(kind: str, rows: tuple[int, ...] = (3, 2)) -> tuple[GatheredParameters, list[torch.Tensor]]:
    """A parameter of rank 1, of which each owner has so many rows."""
    fp32 = {f"{kind}_dtype": "float32" for kind in ("master", "compute", "reduce")}
    spec = ParameterSpec(names=("w",), shape=(sum(rows), 3), unit="", **fp32)
    shards = [torch.full((count, 3), owner + 1.0) for owner, count in enumerate(rows)]
    streams = DeviceStreams(SimulatedDevice(kind))
    return GatheredParameters([spec], [shards], rank=1, streams=streams), shards


def test_owners_are_read_side_by_side() -> None:
    """Own rows first, on the first stream; the next rank's at the same time, on the second."""
    gathered, shards = _gathered("late", rows=(1, 1, 1, 1, 1))
    gathered.fetch("me", 1)
    arrived = []
    for done in gathered._copies.done:
        done.reach()
        arrived.append([owner for owner in range(5) if not gathered.whole[0][owner].isnan().any()])
    assert arrived == [[0, 1, 3], [0, 1, 2, 3, 4]]
    assert [[segment.owner for segment in copies] for copies in gathered._large] == [[1, 3, 0], [2, 4]]
    assert torch.equal(gathered.whole[0], torch.cat(shards))


@KINDS
def test_filled_used_and_freed(kind: str) -> None:
    gathered, shards = _gathered(kind)
    for _ in range(2):
        gathered.fetch("me", 1)
        gathered.fetch("me", 1)
        if kind == "late":
            assert gathered.whole[0].isnan().all(), "nobody has waited"
        gathered.wait()
        gathered.wait()
        assert torch.equal(gathered.whole[0], torch.cat(shards))
        gathered.release("me")
        gathered.release("me")
        assert gathered.whole[0].untyped_storage().nbytes() == 0


@KINDS
def test_what_is_tied_over_units_stays_for_the_last_of_them(kind: str) -> None:
    gathered, shards = _gathered(kind)
    for unit in ("root", "block"):
        gathered.fetch(unit, 1)
        gathered.wait()
    gathered.release("block")
    assert gathered.is_filled
    assert torch.equal(gathered.whole[0], torch.cat(shards))
    gathered.release("root")
    assert gathered.whole[0].untyped_storage().nbytes() == 0


@KINDS
def test_filled_anew_in_its_own_memory(kind: str) -> None:
    gathered, shards = _gathered(kind)
    gathered.fetch("me", 1)
    gathered.wait()
    address = gathered.whole[0].data_ptr()
    shards[0].fill_(7)
    gathered.expire()
    gathered.fetch("you", 2)
    gathered.wait()
    assert gathered.whole[0].data_ptr() == address
    assert torch.equal(gathered.whole[0], torch.cat(shards))
    gathered.release("me")
    assert gathered.is_filled
    gathered.release("you")
    assert not gathered.is_filled
