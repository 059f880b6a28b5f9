"""The thread that watches a device's waits, and the streams beside it: what a GPU would do is simulated or recorded."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from odc_kernels import streams
from odc_triton.engine.transport import DeviceStreams, Streams
from odc_triton.plan.entries import Segment
from odc_triton.plan.segments import SplitPlan
from odc_triton.sequence import sync
from odc_triton.sequence.buffers import Flag, LayerShape
from odc_triton.sequence.exchange import SequenceExchange, Span
from odc_triton.sequence.sync import KernelSync, Wait, _Look, _Running
from tests.support.deadlines import LONG_S
from tests.support.simulated import SimulatedDevice, SimulatedEvent
from tests.support.splitting import Setup, sharded

FLAGS = torch.zeros(2, 1, dtype=torch.int64)  # of two ranks, one layer


def buffers(device: str = "cpu") -> SimpleNamespace:
    heap = SimpleNamespace(device=torch.device(device), first=0, seen=lambda _: [0, 0], is_alive=lambda _: True)
    return SimpleNamespace(heap=heap, rank=0, world=2, layers=1, flags=lambda *_: FLAGS.clone())


def barrier() -> SimpleNamespace:
    status = SimpleNamespace(show=lambda *_: None)
    return SimpleNamespace(timeout_s=0.0, world=2, status=lambda: status, blocked_on=[])


def test_a_look_waits_for_its_own_copy_only() -> None:
    device, place = SimulatedDevice(), buffers()
    place.flags = lambda *_: torch.tensor([[0], [7]])
    look = _Look(place, on=device)
    device.enqueue(look._stream, lambda: None)
    assert look.at(Flag(0)).tolist() == [[0], [7]]
    assert not hasattr(look._stream, "synchronize"), "which other work on the stream could hold up"


class Stuck(SimulatedDevice):
    """It answers `answers` times."""

    answers = 0

    def has_come(self, event: SimulatedEvent) -> bool:
        self.answers -= 1
        return self.answers >= 0 and super().has_come(event)


def test_a_look_at_a_device_that_does_not_answer_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it returns may be old, but is of the flags that were asked for; and no copies pile up."""
    monkeypatch.setattr(sync, "_READ_S", 0.01)
    device, place = Stuck(), buffers()
    place.flags = lambda flag, _: torch.tensor([[0], [7 if flag is Flag.PUBLISHED else 3]])
    look = _Look(place, on=device)
    device.answers = 1
    assert look.at(Flag.PUBLISHED).tolist() == [[0], [7]]
    for _ in range(3):
        assert look.at(Flag.ADDED).tolist() == [[0], [0]]
    assert look._stream.enqueued == 2
    device.answers = 2
    assert look.at(Flag.ADDED).tolist() == [[0], [3]]


def test_the_watch_is_on_its_ranks_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, over = [], threading.Event()
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    over.set()
    watch = KernelSync.__new__(KernelSync)
    watch.buffers = buffers("cuda:3")
    watch._watch(over)
    assert chosen == [torch.device("cuda:3")]


def test_the_watch_of_a_plan_does_not_stop_the_next() -> None:
    """It is looking while the next plan begins, and finds that its deadline has passed."""
    looks, ends = threading.Event(), KernelSync(buffers(), SimpleNamespace(barrier=barrier()))

    def slow(wait: Wait) -> list[int]:
        looks.set()
        time.sleep(0.3)
        return [1]

    ends._late_of = slow
    ends.begin()
    first = ends._watcher
    ends._running.append(_Running(Wait(flag=Flag(0), layer=0, epoch=1, whom={1: "keys"})))
    assert looks.wait(LONG_S)
    ends.begin()
    first.join(LONG_S)
    assert ends._stop.tolist() == [0]
    ends.end()


def test_streams_of_a_gpu_are_not_of_the_pool_that_programs_use(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, *, priority: made.append((device, priority)) or object())
    device = streams.CudaDevice(torch.device("cuda:5"))
    streams._pull_stream.cache_clear()
    assert device.pull_stream() is device.pull_stream()
    device.stream()
    assert made == [(torch.device("cuda:5"), -1)] * 2
    streams._pull_stream.cache_clear()


MINE = Segment(0, 8, 20)
ROWS = (torch.zeros(12, 1, 1), torch.zeros(12, 1, 1))


def exchange_of_rank_1(*, layers: int = 1) -> tuple[SequenceExchange, SplitPlan]:
    """Rank 1 reads rank 0's segment, and rank 2 reads both. Nothing is sent: the order alone counts. One buffer serves
    all layers.
    """
    place = buffers()
    place.rank, place.world, place.tokens, place.layers, place.heap.apart = 1, 3, 30, layers, False
    place.slots, place.stays = [0] * layers, [layer == layers - 1 for layer in range(layers)]
    place.shapes = [LayerShape(heads=1, widths=(1, 1), dtype="float32")] * layers
    place.rows = place.gradient_rows = lambda _layer, _kind, _segment, start, stop: torch.zeros(stop - start, 1, 1)
    sent = {"begin": lambda: None, "signal": lambda *_: None, "wait": lambda _: None, "add": lambda *_: None}
    exchange = SequenceExchange(SimpleNamespace(buffers=place, **sent), Streams(), grid=None, in_order=False)
    return exchange, SplitPlan.of([[[Segment(0, 0, 8)]], [[MINE]], [[Segment(0, 20, 30)]]])


def test_checkpointed_layers_without_gradients_need_no_backward() -> None:
    """Their forward ran without gradients, as in all checkpoints, and nothing runs it again."""
    (exchange, plan), spans = exchange_of_rank_1(layers=2), [Span(MINE, 0, 12)]
    exchange.begin(plan)
    with torch.no_grad():
        for layer in range(2):
            exchange.start(layer, spans, trains=False)
            exchange.publish(layer, spans, None, ROWS)
    with pytest.raises(RuntimeError, match="had no backward"):
        exchange.leave()
    exchange.collect(1, spans, None, ROWS)
    exchange.leave()


def test_a_drain_waits_for_split_sequences_and_looks_at_their_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ODC_SIMULATED_STREAMS", "late")
    engine, seen = sharded(Setup(backend="cpu-sharded"), rank=0)._odc_engine, []
    exchange = engine.participant(SequenceExchange)
    exchange.streams.after_adds(lambda: seen.append("added"))
    exchange.sync.check = lambda: seen.append("looked")
    engine.drain("a test")
    assert seen == ["added", "looked"]


def test_cuda_graphs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the engine, the head or a staged weight orders its streams."""
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: SimpleNamespace())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    device = streams.CudaDevice(torch.device("cuda:0"))
    side, memory = DeviceStreams(device), torch.zeros(4).untyped_storage()
    for use in (device.current, lambda: side.copy(memory, lambda: None), lambda: side.drain(1.0, "the exit")):
        with pytest.raises(RuntimeError, match="a CUDA graph can't hold a sharded model"):
            use()
