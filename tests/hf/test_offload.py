"""What checkpointing keeps goes to the host and comes back: the same bits, and less private memory."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from odc_triton import fully_shard, minibatch
from odc_triton.engine.api import engine_of
from odc_triton.engine.transport import DeviceStreams, Streams
from odc_triton.hf import offload_checkpoints, summed_loss
from odc_triton.packs.offload import OffloadedCheckpoints
from odc_triton.sequence.enable import split_forward
from tests.support import ranks, slow
from tests.support.simulated import SimulatedDevice
from tests.support.splitting import Setup, build, packs_of, raises_in_forward, sharded, step_on

LAYERS, HIDDEN = 4, 64
SETUP = Setup(deal="zigzag", change="checkpointing", sizes=(("num_hidden_layers", LAYERS), ("hidden_size", HIDDEN)))


def _steps(rank: int, world: int, setup: Setup) -> tuple[list[dict[str, torch.Tensor]], list[int], int]:
    """Gradients without and with offloading, and after a microbatch that failed; bytes to the host; own tokens."""
    model = sharded(setup, rank)
    plain = step_on(model, setup, rank)[1]
    offload_checkpoints(model)
    offloaded, counts = engine_of(model).participant(OffloadedCheckpoints), []
    found = step_on(model, setup, rank)[1]
    counts.append(offloaded.sent_bytes)
    with pytest.raises(Exception, match=r"3 GiB|failed"):
        step_on(model, setup, rank, loss_of=raises_in_forward)
    gc.collect()  # torch 2.11 takes a failed checkpoint's hooks away when its generator is freed
    again = step_on(model, setup, rank)[1]
    counts.append(offloaded.sent_bytes)
    packs = packs_of(setup, rank)
    with torch.no_grad(), split_forward(model, packs.split):
        for pack in packs:
            summed_loss(model, pack)
    counts.append(offloaded.sent_bytes)
    return [plain, found, again], counts, sum(pack["input_ids"].numel() for pack in packs)


@pytest.mark.parametrize(
    ("backend", "change"), [("cpu", "reentrant"), ("cpu-sharded", "checkpointing"), slow("cpu-sharded", "reentrant")]
)
def test_the_same_gradients(backend: str, change: str) -> None:
    for (plain, *found), (once, twice, after), tokens in ranks.run(
        _steps, 3, replace(SETUP, backend=backend, change=change)
    ):
        for each in found:  # ranks add in any order
            assert all((each[name] - want).abs().max() <= 1e-6 * want.abs().max() for name, want in plain.items())
        assert once == LAYERS * tokens * HIDDEN * 4
        assert once == twice == after  # nothing in a forward without gradients


def _two_forwards(rank: int, world: int) -> None:
    """Their backwards run in either order, and one graph is dropped without one."""
    setup = Setup(deal="whole", change="checkpointing")
    model = sharded(setup, rank)
    pack = packs_of(setup, rank)[0]

    def gradient(order: tuple[int, ...]) -> list[torch.Tensor]:
        with minibatch(model, tokens=1):
            losses = [summed_loss(model, pack) * (number + 1) for number in range(3)]
            for number in order:
                losses[number].backward()
            del losses
        return [p.grad.full_tensor().clone() for p in model.parameters() if p.grad is not None]

    wanted = [gradient(order) for order in ((0, 1), (1, 0))]
    offload_checkpoints(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})  # as Trainer does when it begins
    offloaded = engine_of(model).participant(OffloadedCheckpoints)
    for order, want in zip(((0, 1), (1, 0)), wanted, strict=True):
        assert all(map(torch.equal, gradient(order), want))
    gc.collect()
    assert sum(map(len, offloaded._free)) == offloaded.host_bytes > 0


def test_two_forwards_before_their_backwards() -> None:
    ranks.run(_two_forwards, 1)


@pytest.mark.parametrize("kind", ["late", "early"])
def test_copies_follow_what_is_computed_and_come_before_they_are_used(kind: str) -> None:
    streams = DeviceStreams(SimulatedDevice(kind))
    offloaded, made = OffloadedCheckpoints(streams), [torch.full((3, 5), float(number)) for number in range(4)]
    for _ in range(2):  # the buffers of the first time serve the second
        kept = [offloaded.keep(each.clone()) for each in made]
        for at in (3, 2, 1, 0):
            assert torch.equal(kept[at].take(), made[at])
            assert [each._there is not None for each in kept] == [each == at - 1 for each in range(4)]  # one ahead
        assert torch.equal(kept[2].take(), made[2])  # a graph that is kept
        del kept
    assert offloaded.host_bytes == 4 * made[0].nbytes


def test_no_memory_for_a_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"No space left on device: 0\.00 GB of host memory for one layer's checkpoint"):
        OffloadedCheckpoints(Streams()).keep(torch.ones(3))


def _private_bytes(rank: int, world: int) -> tuple[int, int, int]:
    """Between forward and backward of one long document: without and with offloading; bytes to the host."""
    setup = Setup(deal="whole", change="checkpointing", sizes=SETUP.sizes, scale=60)
    model = fully_shard(build(setup, replaced=True))
    pack = packs_of(setup, rank)[0]

    def held() -> int:
        with minibatch(model, tokens=1):
            loss = summed_loss(model, pack)
            ctypes.CDLL(None).malloc_trim(0)
            text = Path("/proc/self/smaps_rollup").read_text()
            loss.backward()
        return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Anonymous")) * 1024

    held()
    without = held()
    offload_checkpoints(model)
    return without, held(), engine_of(model).participant(OffloadedCheckpoints).sent_bytes


def test_bytes_leave_the_private_memory() -> None:
    ((without, less, count),) = ranks.run(_private_bytes, 1)
    assert without - less == pytest.approx(count, rel=0.1)


def test_refusals() -> None:
    ranks.run(_refused, 1)


def _refused(rank: int, world: int) -> None:
    plain = build(Setup(), replaced=False)
    with pytest.raises(TypeError, match="is not sharded"):
        offload_checkpoints(plain)
    with pytest.raises(ValueError, match="no layer of Qwen2ForCausalLM is checkpointed: call"):
        offload_checkpoints(fully_shard(plain))
    model = fully_shard(build(SETUP, replaced=False))
    offload_checkpoints(model)
    with pytest.raises(ValueError, match="was called on this model before"):
        offload_checkpoints(model)
