"""`record_timeline`: what ranks wait is what it records."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import odc_triton
from odc_triton import minibatch, record_timeline
from odc_triton.base.events import Event, total_s
from odc_triton.fsdp2.found import replace_comms
from tests.support import ranks

SLEEP_S = 0.03


class Arriving:
    """A collective that counts in the store how often rank 0 has come."""

    def __init__(self, comm: Any) -> None:
        self.comm, self.allocate = comm, comm.allocate

    def __call__(self, *args: Any, **options: Any) -> Any:
        dist.distributed_c10d._get_default_store().add(f"rank {dist.get_rank()} came", 1)
        return self.comm(*args, **options)


def _sleep_on_rank_1(*_: object) -> None:
    """Once rank 0 is in the next collective; so whatever the machine does, rank 0 waits for so long."""
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        while store.add("rank 0 came", 0) <= store.add("rank 1 came", 0):
            time.sleep(0.001)
        time.sleep(SLEEP_S)


def _watch(module: nn.Module, args: Any, output: torch.Tensor) -> None:
    output.register_hook(_sleep_on_rank_1)


def _train(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        model(torch.randn(3, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _recorded(rank: int, world: int, folder: Path) -> dict[int, float]:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(2)))
    for part in (*model, model):
        fully_shard(part)
    replace_comms(model, lambda comm, label: Arriving(comm))
    model[1].register_forward_pre_hook(_sleep_on_rank_1, prepend=True)
    model[0].register_forward_hook(_watch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recording = record_timeline(model)
    _train(model, optimizer)
    _train(model, optimizer)
    idle = recording.save(folder, "FSDP2")
    _train(model, optimizer)
    replace_comms(model, lambda comm, label: comm.comm)  # those of this test are there again
    assert recording._log.drain() == []

    model = odc_triton.fully_shard(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recording = record_timeline(model)
    for _ in range(2):
        with minibatch(model):
            model(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()
    recording.save(folder, "ours")
    return idle


def test_recorded_waits_are_those_of_the_loop(tmp_path: Path) -> None:
    idle, of_rank_1 = ranks.run(_recorded, 2, tmp_path)
    events = [Event.of_row(row) for row in json.loads((tmp_path / "FSDP2.events.json").read_text())]
    assert {(event.rank, event.minibatch) for event in events} == {(0, 1), (1, 1)}, "without the step to warm up"
    own = {rank: [event for event in events if event.rank == rank] for rank in (0, 1)}
    for of_rank in own.values():
        assert [each.kind for each in of_rank if each.kind != "wait"] == [*["forward", "backward"] * 2, "step"]
        assert {each.label for each in of_rank if each.kind == "wait"} == {"all-gather", "reduce-scatter"}
    for microbatch in (0, 1):
        long = [e for e in own[0] if (e.kind, e.microbatch) == ("wait", microbatch) and e.end_s - e.start_s >= SLEEP_S]
        assert len(long) >= 2, "rank 1 slept in forward and backward, and rank 0 waited"
    slept_s = 4 * SLEEP_S
    assert total_s(own[0], "wait") >= slept_s
    assert total_s(own[1], "forward", "backward") - total_s(own[1], "wait") >= slept_s, "who sleeps does not wait"
    assert idle == of_rank_1
    window_s = max(event.end_s for event in events) - min(event.start_s for event in events)
    assert slept_s <= idle[0] * window_s + 1e-9
    assert idle[1] * window_s <= window_s - slept_s + 1e-9
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [each["args"]["name"] for each in trace if each["name"] == "process_name"] == ["FSDP2", "ours"]
