"""Muon and AdamW beside it in training: losses, publications, and a rank that dies in the step."""

from __future__ import annotations

import os
import signal

import pytest
import torch
import torch.distributed as dist
from torch import nn

from odc_triton import MixedPrecisionPolicy, fully_shard, minibatch
from odc_triton.optim import ChainedOptimizer, Muon, buffers, muon
from odc_triton.tools.memory.footprint import memory_plan
from tests.support import ranks, slow
from tests.support.deadlines import LONG_S
from tests.support.models import CASES, build, microbatches
from tests.support.recorded import give_gradients, sharded
from tests.support.refusals import ended

STEPS = 5


def _split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """(matrices of the blocks, the rest)."""
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.ndim == 2 and ".layers." in name]
    held = {id(p) for p in matrices}
    return matrices, [p for _, p in named if id(p) not in held]


def _on_one_process() -> list[float]:
    torch.set_num_threads(1)
    model, case, losses = build("qwen2"), CASES["qwen2"], []
    matrices, others = _split(model)
    optimizers = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=1e-2)]
    for step in range(STEPS):
        batches = microbatches("qwen2", [9, 17, 12], seed=step % 2)
        total = sum(case.count(batch) for batch in batches)
        loss = sum(case.loss(model, batch) for batch in batches) / total
        loss.backward()
        losses.append(loss.item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def _train(rank: int, world: int, backend: str, together: bool, bf16: bool) -> tuple[list[float], list[int], tuple]:
    """Losses of all ranks, the publications of each step, and the bytes of this rank's states and of the buffers."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if bf16 else None)
    model, case = fully_shard(build("qwen2"), mp_policy=policy, backend=backend), CASES["qwen2"]
    matrices, others = _split(model)
    optimizers = [Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=1e-2)]
    optimizers = [ChainedOptimizer(*optimizers)] if together else optimizers
    losses, published = [], []
    for step in range(STEPS):
        mine = microbatches("qwen2", [9, 17, 12], seed=step % 2)[rank::world]
        total = torch.zeros(())
        with minibatch(model, tokens=sum(case.count(batch) for batch in mine)) as mb:
            for batch in mine:
                loss = case.loss(model, batch) / mb.tokens
                loss.backward()
                total += loss.detach()
        dist.all_reduce(total)
        losses.append(total.item())
        before = model._odc_engine.publication.number
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        published.append(model._odc_engine.publication.number - before)
    values = [value for each in optimizers for state in each.state.values() for value in state.values()]
    state_bytes = sum((value.to_local() if hasattr(value, "to_local") else value).nbytes for value in values)
    heap = getattr(optimizers[0], "optimizers", optimizers)[0]._buffers._heap
    return losses, published, (state_bytes, heap.size_bytes - heap._data_offset)


@pytest.mark.parametrize(
    ("world", "backend", "together", "bf16"), [(2, "cpu", True, False), (3, "cpu-sharded", False, True)]
)
def test_losses(world: int, backend: str, together: bool, bf16: bool) -> None:
    want = _on_one_process()
    assert want[-1] < 0.8 * want[0]
    results = ranks.run(_train, world, backend, together, bf16)
    for losses, published, _ in results:
        # The gradients differ in their last bits, and Newton-Schulz in bf16 makes that 1e-3 of an update.
        torch.testing.assert_close(losses, want, rtol=0.01, atol=0)
        assert published == [1 if together else 2] * STEPS
    plan, without = (
        memory_plan(build("qwen2"), world, optimizer=each, backend="cpu" if backend == "cpu" else "cuda")
        for each in ("muon", "adamw")
    )
    assert results[0][2] == (plan.optimizer_state_bytes, plan.job_shared_bytes - without.job_shared_bytes)
    assert plan.muon_bytes == plan.shared_bytes - without.shared_bytes > 0


DEATHS = {"rows": (buffers.MuonBuffers, "orthogonalise"), "matrices": (muon, "_zeropower_via_newtonschulz")}


def _killed(rank: int, world: int, where: str, shape: tuple[int, ...], backend: str) -> tuple[str, list, str, float]:
    model, optimizer = sharded(shape, backend)

    def die(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def steps() -> None:
        for step in range(2):
            if step == 1 and rank == 1:
                setattr(*DEATHS[where], die)
            give_gradients(model, step)
            optimizer.step()

    return ended(steps)


@pytest.mark.parametrize(
    ("where", "shape", "backend", "awaited"),
    [
        ("rows", (3,), "cpu", "the rows of Muon's step 1"),
        ("matrices", (3,), "cpu-sharded", "the matrices of Muon's step 1"),
        slow("matrices", (2, 2), "cpu", ""),
    ],
)
def test_a_killed_rank_is_named(where: str, shape: tuple[int, ...], backend: str, awaited: str) -> None:
    world = torch.Size(shape).numel()
    others = [rank for rank in range(world) if rank != 1]
    with ranks.start(_killed, world, where, shape, backend) as job:
        for outcome in job.wait_for(others):
            assert outcome.error is None, outcome.error
            kind, named, text, seconds = outcome.value
            assert kind == "RankLost", text
            assert named == [1], text
            assert "rank 1 died" in text
            assert awaited in text
            assert seconds < LONG_S / 2  # found dead, not late


def _raises(rank: int, world: int) -> list[tuple[str, list, str, float]]:
    model, optimizer = sharded((world,), "cpu")

    def no_memory(*_: object) -> None:
        raise MemoryError("no memory for a matrix")

    if rank == 1:
        muon._zeropower_via_newtonschulz = no_memory
    give_gradients(model, 0)
    return [ended(optimizer.step) for _ in range(2)]


def test_a_rank_that_raises_keeps_nobody_waiting() -> None:
    for rank, (first, second) in enumerate(ranks.run(_raises, 2)):
        assert first[:2] == (("MemoryError", []) if rank == 1 else ("RankLost", [1])), first
        assert rank == 0 or first[2] == "no memory for a matrix"
        assert second[0] == "RuntimeError"
        assert "a barrier failed, so gradients are partial" in second[2]
        assert first[3] + second[3] < LONG_S / 2
