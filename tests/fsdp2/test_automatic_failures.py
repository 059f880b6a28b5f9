"""`use_odc(automatic=…)`: what goes wrong is named, on all ranks, and what was changed in torch is put back."""

from __future__ import annotations

import gc
import itertools
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from odc_triton import begin_minibatch, end_minibatch, use_odc
from tests.support import ranks
from tests.support.bridged import batches_of, count_of, exploding, loss_of, made, optimizer_of, sharded, under_odc
from tests.support.deadlines import LONG_S
from tests.support.gradients import gradients_of
from tests.support.refusals import caught

NAME = "both branches"


def _loss(model: nn.Module, batch: int = 0) -> torch.Tensor:
    return loss_of(NAME, model, batches_of(NAME, 0, 4)[batch])


def _one_rank_reads_a_gradient(model: nn.Module, optimizer: Optimizer, rank: int) -> None:
    _loss(model, rank).backward()
    if rank == 0:
        norm = model.head.weight.grad.norm()
        print(norm)
    optimizer.step()


def _one_rank_zeroes(model: nn.Module, optimizer: Optimizer, rank: int) -> None:
    _loss(model, rank).backward()
    if rank == 0:
        optimizer.zero_grad()
    optimizer.step()


def _one_rank_loads(model: nn.Module, optimizer: Optimizer, rank: int) -> None:
    _loss(model, rank).backward()
    if rank == 0:
        model.load_state_dict({}, strict=False)
    optimizer.step()


def _the_closure_runs_twice(model: nn.Module, optimizer: Optimizer, rank: int) -> None:
    class Twice(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return closure() + closure()

    def closure() -> torch.Tensor:
        loss = _loss(model, rank)
        loss.backward()
        return loss

    Twice(model.parameters()).step(closure)


def _minibatch_by_hand(model: nn.Module, optimizer: Optimizer, rank: int) -> None:
    begin_minibatch(model)


def _ended_by_hand(model: nn.Module, optimizer: Optimizer, rank: int) -> None:
    _loss(model, rank).backward()
    end_minibatch(model)


def _a_hook_on_one_rank(model: nn.Module, optimizer: Optimizer, rank: int) -> None:
    if rank == 1:
        model.head.weight.register_post_accumulate_grad_hook(print)
    _loss(model, rank).backward()
    optimizer.step()


def _a_gradient_of_an_earlier_step(model: nn.Module, optimizer: Optimizer, rank: int) -> None:
    kept = model.head.weight.grad
    for _ in range(2):
        _loss(model, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    kept.sum()


def _a_kept_gradient_is_read_after_zero_grad(model: nn.Module, optimizer: Optimizer, rank: int) -> None:
    _loss(model, rank).backward()
    kept = model.head.weight.grad
    optimizer.step()
    optimizer.zero_grad()
    kept.norm()


def _read_inside_a_backward(model: nn.Module, optimizer: Optimizer, rank: int) -> None:
    weight = model.blocks[0].ways["odd"].weight  # pyright: ignore
    loss = _loss(model, rank)
    loss.register_hook(lambda _: weight.grad.sum())
    loss.backward()


def _zeroed_by_hand_after_a_backward(model: nn.Module, optimizer: Optimizer, rank: int) -> None:
    _loss(model, rank).backward()
    for each in model.parameters():
        each.grad = None
    optimizer.step()


_MISUSES: dict[Callable, tuple[str, ...]] = {
    _one_rank_reads_a_gradient: ("rank 0: a gradient was used, ", "failures.py:36", "rank 1: an optimizer stepped, "),
    _one_rank_zeroes: ("rank 0: gradients were zeroed before a step, ", "rank 1: an optimizer stepped, "),
    _one_rank_loads: ("rank 0: a state_dict was loaded, ", "rank 1: an optimizer stepped, "),
    _the_closure_runs_twice: ("Twice.step(closure) calls its closure more than once",),
    _minibatch_by_hand: ("begin and end by themselves", "leave `minibatch` out"),
    _ended_by_hand: ("end_minibatch of a model whose minibatches end by themselves",),
    _a_hook_on_one_rank: ("only on ranks [1] minibatches end with the backward",),
    _a_gradient_of_an_earlier_step: ("a gradient of head.weight was kept from minibatch 0", "read p.grad again"),
    _a_kept_gradient_is_read_after_zero_grad: (
        "a gradient of head.weight was kept from minibatch 0",
        "read p.grad again",
    ),
    _read_inside_a_backward: ("p.grad of blocks.0.ways.odd.weight is used inside a backward",),
    _zeroed_by_hand_after_a_backward: (
        "zeroed inside the minibatch, after a backward",
        "Zero it by optimizer.zero_grad()",
    ),
}


def _misused(rank: int, world: int, name: str) -> str:
    model = under_odc(automatic=True, timeout=LONG_S)
    misuse = next(each for each in _MISUSES if each.__name__ == name)
    return caught(lambda: misuse(model, optimizer_of(model, "sgd"), rank))


@pytest.mark.parametrize("misuse", _MISUSES, ids=lambda each: each.__name__.strip("_"))
def test_misuse_is_named_on_all_ranks(misuse: Callable) -> None:
    for said in ranks.run(_misused, 2, misuse.__name__):
        assert all(words in said for words in _MISUSES[misuse]), said


def _recovers(rank: int, world: int, automatic: Any) -> list[str]:
    """A forward and a backward raise on rank 1, which goes on; the next step is right, and eager as before."""
    model, said = under_odc(automatic=automatic, timeout=LONG_S), []
    optimizer = optimizer_of(model, "sgd")
    for _ in exploding(model, rank == 1):
        raised = caught(lambda: _loss(model, rank).backward())
        if rank == 0 and automatic == "eager":
            said.append(raised)
            continue
        assert raised == ("ValueError: exploded" if rank == 1 else "nothing was raised")
        said.append(caught(optimizer.step))
    total = sum(count_of(NAME, each) for each in batches_of(NAME, 0, 2))
    (_loss(model, rank) * world / total).backward()
    is_open = any("Waiting" in type(each.grad).__name__ for each in model.parameters())
    assert is_open == (automatic != "eager")
    plain = made(NAME, "")
    for batch in range(2):
        (_loss(plain, batch) / total).backward()
    found = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
    torch.testing.assert_close(found, gradients_of(plain), rtol=1e-5, atol=1e-6)
    return said


@pytest.mark.skipif(not hasattr(FSDPModule, "reset_iter_state"), reason="torch before 2.13 can't reset FSDP2")
def test_a_microbatch_that_raised_fails_the_step_on_all_ranks_and_the_next_is_right() -> None:
    for said in itertools.chain(*ranks.run_all(2, (_recovers, True), (_recovers, "eager"))):
        assert len(said) == 2
        assert all(each.startswith("MinibatchFailed") and "rank 1: " in each for each in said), said


def _cannot_enter(rank: int, world: int) -> tuple[str, float]:
    """Rank 1 can't enter, has no microbatch in the next step, and takes part in it by clipping."""
    model = under_odc(automatic=True, timeout=LONG_S)
    torch.use_deterministic_algorithms(rank == 1)
    said = caught(lambda: _loss(model, rank))
    torch.use_deterministic_algorithms(False)
    if rank == 0:
        _loss(model).backward()
    norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer_of(model, "sgd").step()
    return said, norm.full_tensor().item()


def test_a_rank_that_could_not_enter_takes_part_in_the_next_step() -> None:
    (first, norm), (second, other) = ranks.run(_cannot_enter, 2)
    assert first == second
    assert "rank 1: RuntimeError: torch.use_deterministic" in first, first
    assert norm == other
    assert norm > 0


def _dies(rank: int, world: int) -> None:
    model = under_odc(automatic=True, timeout=LONG_S)
    _loss(model, rank).backward()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer_of(model, "sgd").step()


def test_a_dead_rank_is_named() -> None:
    outcome = ranks.start(_dies, 2).join()[0]
    assert outcome.error_type == "RankLost"
    assert "rank 1" in (outcome.error or "").splitlines()[-1]


def _gathers(rank: int, world: int) -> str:
    """A collective in each microbatch, and rank 1 has one less."""
    model = under_odc(automatic=True, timeout=3)
    for _ in range(2 - rank):
        loss = _loss(model, rank)
        dist.all_reduce(loss.detach().clone())
        loss.backward()
    return caught(optimizer_of(model, "sgd").step)


def test_a_collective_in_some_ranks_microbatches_is_named_within_the_deadline() -> None:
    outcome = ranks.start(_gathers, 2).join()[1]
    assert "DeadlineExceeded: rank 1 has waited 3.0 s for rank 0 at 'leave minibatch 0'" in outcome.value, outcome


def _two_models(rank: int, world: int) -> None:
    """Only one is trained; what both run in does not mix. When they are gone torch is as it was."""
    zero_grad = vars(Optimizer)["zero_grad"]
    model, other, optimizers = under_odc(automatic=True), under_odc(automatic=True), []
    plain = made(NAME, "")
    for each in (model, plain):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for _ in range(2):
            scale = 1.0 if each is plain else float(world)
            for batch in range(2) if each is plain else [rank]:
                loss = _loss(each, batch)
                (scale * (loss + (_loss(other if each is model else each, batch).detach()))).backward()
            if each is model:
                _loss(other, rank).backward()  # never stepped
            optimizer.step()
            optimizer.zero_grad()
    for mine, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), wanted, rtol=1e-5, atol=1e-6)
    assert vars(Optimizer)["zero_grad"] is not zero_grad
    del model, other, optimizers, optimizer, each, loss, mine
    for _ in range(2):  # what the first finds are the last references to the second's
        gc.collect()
    assert vars(Optimizer)["zero_grad"] is zero_grad
    with pytest.raises(ValueError, match="automatic is 'lazily'"):
        use_odc(sharded(), automatic="lazily")  # pyright: ignore[reportArgumentType]


def test_models_share_nothing_and_torch_is_put_back() -> None:
    ranks.run(_two_models, 2)
