"""Evaluation, generate() and full_parameters outside of a minibatch, by one rank alone too."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from odc_triton import MixedPrecisionPolicy, full_parameters, fully_shard, minibatch, publish
from tests.support import ranks
from tests.support.blocks import batch as block_batch
from tests.support.blocks import build as build_blocks
from tests.support.deadlines import LONG_S
from tests.support.models import CASES, build, microbatches
from tests.support.refusals import caught

BF16 = torch.bfloat16
CASE = CASES["qwen2"]
PROMPT = torch.tensor([[5, 9, 3, 17]])


def _generate(model: nn.Module) -> list[int]:
    return model.generate(PROMPT, max_new_tokens=6, do_sample=False, pad_token_id=0).tolist()


def _losses(model: nn.Module) -> list[float]:
    return [CASE.loss(model, batch).item() for batch in microbatches("qwen2", [8, 11], seed=100)]


def _plain(bf16: bool, steps: int) -> list[nn.Module]:
    """The model after each step; in bf16 its gradients are taken on, and it is read as, a bf16 copy."""
    master = build("qwen2")
    optimizer = torch.optim.AdamW(master.parameters(), lr=1e-2)
    seen = []
    for step in range(steps):
        for batch in microbatches("qwen2", [6, 9], seed=step):
            model = build("qwen2")
            model.load_state_dict(master.state_dict())
            model.to(BF16 if bf16 else torch.float32)
            (CASE.loss(model, batch) / 15).backward()
            for parameter, computed in zip(master.parameters(), model.parameters(), strict=True):
                gradient = computed.grad.float()
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        optimizer.step()
        optimizer.zero_grad()
        copy = build("qwen2")
        copy.load_state_dict(master.state_dict())
        seen.append(copy.to(BF16 if bf16 else torch.float32).eval())
    return seen


def _alone(rank: int, world: int, bf16: bool, mode: str) -> list[tuple]:
    model = fully_shard(build("qwen2"), mp_policy=MixedPrecisionPolicy(param_dtype=BF16 if bf16 else None))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if rank == 1:  # late: rank 0 must not read what has not been stepped yet
        optimizer.register_step_pre_hook(lambda *_: time.sleep(0.3))
    evaluate = {"no_grad": torch.no_grad, "inference": torch.inference_mode}[mode]
    seen = []
    for step in range(3):
        batch = microbatches("qwen2", [6, 9], seed=step)[rank]
        model.train()
        with minibatch(model, tokens=CASE.count(batch)) as mb:
            (CASE.loss(model, batch) / mb.tokens).backward()
        optimizer.step()
        if rank == 0:
            model.eval()
            with evaluate():
                first = dict(full_parameters(model)) if step == 1 else {}  # it waits for rank 1, as a forward does
                seen.append((_losses(model), _generate(model), first or dict(full_parameters(model))))
    return seen


def test_rank_0_alone_right_after_its_step() -> None:
    cases = [(True, "no_grad"), (False, "inference")]
    for (bf16, _), outcome in zip(cases, ranks.run_all(2, *((_alone, *case) for case in cases)), strict=True):
        seen, nothing = outcome
        assert nothing == []
        for (losses, tokens, parameters), plain in zip(seen, _plain(bf16, 3), strict=True):
            assert list(parameters) == [name for name, _ in plain.named_parameters()]
            with torch.no_grad():
                # fp32: sums in another order. bf16: such a difference may flip a rounding, 2^-8, of a few of the
                # weights.
                torch.testing.assert_close(losses, _losses(plain), rtol=1e-3 if bf16 else 1e-5, atol=0)
                assert tokens == _generate(plain)
            for name, value in plain.named_parameters():
                assert parameters[name].dtype == value.dtype
            # By norm over all: AdamW turns a gradient element that is nothing but rounding into a full step.
            errors = [(parameters[name] - value).double().square().sum() for name, value in plain.named_parameters()]
            norms = [value.double().square().sum() for value in plain.parameters()]
            assert (sum(errors) / sum(norms)).sqrt() < (1e-2 if bf16 else 1e-5)


def _torn_walk(rank: int, world: int) -> str:
    """Rank 1 steps while rank 0 still walks: what rank 0 would read is neither the old nor the new model."""
    model = fully_shard(build("conv"))
    walk = full_parameters(model) if rank == 0 else iter(())
    if rank == 0:
        next(walk)
    dist.barrier()
    if rank == 1:
        publish(model)
    dist.barrier()
    return caught(lambda: list(walk))


def _torn_forward(rank: int, world: int) -> str:
    """Rank 0 evaluates between its exit and its step, while rank 1 steps."""
    model, store = fully_shard(build_blocks()), dist.distributed_c10d._get_default_store()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with minibatch(model):
        model(block_batch(0)).sum().backward()
    said = ""
    if rank == 0:
        model.blocks[0].register_forward_hook(lambda *_: store.wait(["rank 1 stepped"], timedelta(seconds=LONG_S)))
        said = caught(lambda: model(block_batch(0)))
    optimizer.step()
    store.set(f"rank {rank} stepped", "1")
    return said


def _slow_step(rank: int, world: int) -> str:
    """Rank 0 evaluates while rank 1's step writes its masters, which peers read where they are written."""

    class Slow(torch.optim.SGD):
        def step(self, closure: object = None) -> None:
            super().step()
            dist.barrier()  # it has begun, and rank 0 reads
            dist.barrier()

    model = fully_shard(nn.Sequential(nn.Linear(2, 2)))
    optimizer = Slow(model.parameters(), lr=0.1)
    with minibatch(model):
        model(torch.ones(1, 2)).sum().backward()
    if rank == 1:
        optimizer.step()
        return ""
    dist.barrier()
    with torch.no_grad():
        said = caught(lambda: model(torch.ones(1, 2)))
    dist.barrier()
    return said


def _stepped_meanwhile(rank: int, world: int) -> None:
    model = fully_shard(build("conv"))
    walk = full_parameters(model)
    next(walk)
    dist.barrier()
    publish(model)
    with pytest.raises(RuntimeError, match="read them again"):
        next(walk)


def test_a_torn_read_is_refused() -> None:
    *found, _ = ranks.run_all(2, _torn_walk, _torn_forward, _slow_step, _stepped_meanwhile)
    for said, nothing in found:
        assert "RuntimeError: " in said
        assert "ranks [1] stepped or published while rank 0 was still reading" in said
        assert nothing in ("", "nothing was raised")
