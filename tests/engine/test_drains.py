"""What a rank tells its peers is true of its device too: by a simulated device, on which a layer's work is still to do.

Layers here enqueue work as a kernel of theirs would be, and nothing but a drain waits for it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from odc_triton import MinibatchFailed, MixedPrecisionPolicy, full_parameters, fully_shard, minibatch
from odc_triton.comm.memory.heap import Status
from odc_triton.engine.shard import HeapShard
from odc_triton.engine.transport import DeviceStreams, KernelTransport, Target
from odc_triton.nn.replace import replace_layers
from tests.support import ranks
from tests.support.simulated import SimulatedDevice


class Late(nn.Module):
    """A layer whose work is enqueued on whichever stream is current. `done`: how often it was done."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.done, self.device = nn.Linear(2, 2, bias=False), 0, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.device.enqueue(self.device.current(), self._work)
        return self.linear(x)

    def _work(self) -> None:
        self.done += 1


@pytest.fixture(params=["gathered", "on demand"])
def model(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Late]:
    """Of parameters on demand nothing is gathered, so nothing but the layer itself uses the current stream."""
    monkeypatch.setenv("ODC_SIMULATED_STREAMS", "late")
    layer = Late()
    if request.param == "on demand":
        replace_layers(layer, roles=["linear"], choice="eager/direct/fused", verbose=False)
    model = fully_shard(layer, backend="cpu-sharded")
    model.device = model._odc_engine.streams.first.device
    assert model.device.kind == "late"
    return model


def test_a_minibatch_ends_when_every_stream_has_ended(model: Late) -> None:
    streams = [model.device.current(), *(model.device.stream() for _ in range(2))]
    with minibatch(model):
        for stream in streams:
            with model.device.computing_on(stream):
                model(torch.ones(1, 2)).sum().backward()
        assert model.done == 0
    assert model.done == 3


def test_an_evaluation_has_read_when_it_looks_whether_it_was_torn(model: Late) -> None:
    look = model._odc_engine.publication.check_not_torn
    seen = []
    model._odc_engine.publication.check_not_torn = lambda: (seen.append(model.done), look())
    with torch.no_grad(), model.device.computing_on(model.device.stream()):
        model(torch.ones(1, 2))
    assert seen == [1]


def test_whole_parameters_have_been_read(model: Late, monkeypatch: pytest.MonkeyPatch) -> None:
    read = HeapShard.read

    def reads_late(self: HeapShard) -> torch.Tensor:
        value = read(self)
        late = torch.full_like(value, torch.nan)
        model.device.enqueue(model.device.current(), lambda: late.copy_(value))
        return late

    monkeypatch.setattr(HeapShard, "read", reads_late)
    for _, value in full_parameters(model):
        assert value.isfinite().all()


def test_peers_see_what_the_device_has_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left to do whenever a rank shows its peers a status, but for the one that announces a step."""
    monkeypatch.setenv("ODC_SIMULATED_STREAMS", "late")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = fully_shard(nn.Linear(2, 2), backend="cpu-sharded", mp_policy=policy)
    model.set_gradient_divide_factor(2.0)
    optimizer, engine = torch.optim.SGD(model.parameters(), lr=0.5), model._odc_engine
    device, announced = engine.streams.first.device, engine.publication.stepping
    show, left_then = Status.show, []

    def left() -> int:
        return sum(stream.enqueued - stream.done for stream in device.streams)

    def shows(self: Status, value: int) -> None:
        if self is not announced:
            left_then.append(left())
        show(self, value)

    monkeypatch.setattr(Status, "show", shows)
    for _ in range(2):
        with minibatch(model):
            model(torch.ones(1, 2)).sum().backward()
        assert left() == 0
        assert model.weight.grad.to_local().tolist() == [[0.5, 0.5]] * 2
        optimizer.step()
    assert len(left_then) >= 6  # each minibatch has an entry, an exit and a publication
    assert not any(left_then), left_then


def test_what_was_sharded_before_its_root_is_drained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ODC_SIMULATED_STREAMS", "late")
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    plain = copy.deepcopy(model)
    plain(torch.ones(1, 2)).sum().backward()
    fully_shard(model[0], backend="cpu-sharded")
    fully_shard(model, backend="cpu-sharded")
    with minibatch(model):
        model(torch.ones(1, 2)).sum().backward()
    assert torch.equal(model[0].weight.grad.to_local(), plain[0].weight.grad)


def test_a_kernel_that_adds_is_waited_for() -> None:
    device = SimulatedDevice()
    streams, shards, done = DeviceStreams(device), [torch.zeros(2, 4)], []
    with device.computing_on(device.stream()):
        KernelTransport(None, streams).sink(Target(number=0, shards=shards, rank=0), name="w", waited=lambda _: None)
        device.enqueue(device.current(), lambda: done.append(True))
    streams.drain(1.0, "a test")
    assert done == [True]


def test_an_operator_waits_for_what_was_fetched_ahead() -> None:
    engine = fully_shard(nn.Linear(2, 2), backend="cpu-sharded")._odc_engine
    engine.units[0].fetch()
    for parameter in engine.parameters:
        (whole,) = parameter.parts("gathered")
        assert torch.equal(whole, parameter.read())


def test_unsharded_parameters_are_there() -> None:
    model = fully_shard(nn.Linear(2, 2), backend="cpu-sharded")
    wanted = dict(full_parameters(model))
    model.unshard()
    torch.testing.assert_close(dict(model.named_parameters()), wanted, rtol=0, atol=0)
    model.reshard()


def _status_on_rank_1(rank: int, world: int) -> tuple[str, list[int]]:
    """On rank 1 a kernel's wait for an owner's rows times out, as its status says: the errors on each rank."""
    model = fully_shard(nn.Linear(4, 4), backend="cpu-sharded")
    weight = next(each for each in model._odc_engine.parameters if each.name == "weight")
    said, failed = "", []
    try:
        with minibatch(model):
            model(torch.ones(1, 4)).sum().backward()
            pulled = weight.pull()
            if rank == 1:
                pulled.status.fill_(1)
    except MinibatchFailed as error:
        said, failed = str(error), list(error.ranks)
    with minibatch(model):
        model(torch.ones(1, 4)).sum().backward()
    return said, failed


def test_a_kernel_that_waited_in_vain_fails_the_minibatch_on_all_ranks() -> None:
    for said, failed in ranks.run(_status_on_rank_1, 2):
        assert failed == [1]
        assert "the rows of owner 0 of a weight (4, 4) did not arrive at rank 1" in said
