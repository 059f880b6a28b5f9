"""`use_odc(automatic=…)`: loops as they are written for FSDP2 do what they do with one process of plain torch, where
ranks have different numbers of microbatches, and some none at all.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import pickle
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from bench.whole import whole
from odc_triton import use_odc
from tests.support import ranks
from tests.support.bridged import LAYOUTS, batches_of, count_of, loss_of, made
from tests.support.deadlines import LONG_S

NAME = "both branches"
UNEVEN = ([[], [0, 1]], [[0, 1, 2], [3]], [[0], []], [[1], [0, 2]])  # by step, each rank's microbatches
EVEN = ([[0, 1], [2, 3]], [[3, 2], [1, 0]], [[0, 1], [2, 3]])
ODD = ([[0], [1]], [[1, 3], [0]], [[3], [0]])  # of such sizes, for which half of `branches` is not used


@dataclass
class Loop:
    """A training loop's parts: of one rank, or of plain torch in one process that has all ranks' microbatches."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    factor: float
    name: str = NAME
    is_plain: bool = False

    def losses(self, step: int, batches: list[int], total: int, model: nn.Module | None = None) -> Iterator[Any]:
        every = batches_of(self.name, step, 4)
        for each in batches:
            yield loss_of(self.name, model or self.model, every[each]) * self.factor / total

    def no_sync(self) -> None:
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(False)

    def clip(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.05)


Mine = Callable[..., Iterator[Any]]
PROGRAMS: dict[str, Any] = {}


def program(
    *, deals: tuple = UNEVEN, name: str = NAME, automatic: Any = True, **options: float
) -> Callable[[Callable], Callable]:
    """`options`: of SGD."""

    def register(run: Callable) -> Callable:
        PROGRAMS[run.__name__.strip("_")] = (run, deals, name, automatic, options)
        return run

    return register


def _step(loop: Loop, losses: Iterable[Any], *, clips: bool = False, zeroes: bool = True) -> None:
    for loss in losses:
        loss.backward()
    if clips:
        loop.clip()
    loop.optimizer.step()
    if zeroes:
        loop.optimizer.zero_grad()


@program()
def _clipped(loop: Loop, step: int, mine: Mine) -> None:
    _step(loop, mine(), clips=True)


@program()
def _zeroed_first(loop: Loop, step: int, mine: Mine) -> None:
    loop.optimizer.zero_grad()
    _step(loop, mine(), clips=True, zeroes=False)


@program(deals=EVEN)
def _zeroed_between_forward_and_backward(loop: Loop, step: int, mine: Mine) -> None:
    losses = list(mine())
    loop.optimizer.zero_grad()
    _step(loop, losses, zeroes=False)


@program(name="branches", momentum=0.9, weight_decay=0.1)
def _zeroed_in_place(loop: Loop, step: int, mine: Mine) -> None:
    """So parameters that no microbatch uses have zeros, by which momenta go on."""
    loop.optimizer.zero_grad(set_to_none=False)
    _step(loop, mine(), clips=True, zeroes=False)


@program(name="branches", momentum=0.9, weight_decay=0.1)
def _zeroed_by_the_model(loop: Loop, step: int, mine: Mine) -> None:
    _step(loop, mine())
    loop.model.zero_grad(set_to_none=step == 1)


@program(name="branches")
def _without_sync(loop: Loop, step: int, mine: Mine) -> None:
    loop.no_sync()
    _clipped(loop, step, mine)


@program()
def _never_zeroed(loop: Loop, step: int, mine: Mine) -> None:
    """Gradients of earlier steps are added to."""
    _step(loop, mine(), zeroes=False)


@program(deals=EVEN)
def _thrown_away(loop: Loop, step: int, mine: Mine) -> None:
    for loss in mine():
        loss.backward()
    loop.optimizer.zero_grad()
    _clipped(loop, step, mine)


@program(deals=EVEN)
def _steps_are_left_out(loop: Loop, step: int, mine: Mine) -> None:
    for loss in mine():
        loss.backward()
    loop.clip()
    if step != 1:
        loop.optimizer.step()
    loop.optimizer.zero_grad()


@program()
def _closure(loop: Loop, step: int, mine: Mine) -> None:
    def closure() -> float:
        loop.optimizer.zero_grad()
        losses = []
        for loss in mine():
            loss.backward()
            losses.append(loss.item())
        loop.clip()
        return sum(losses, 0.0)

    loss: Any = loop.optimizer.step(closure)
    assert isinstance(loss, float)


@program(name="branches")
def _gradients_are_used_in_many_ways(loop: Loop, step: int, mine: Mine) -> None:
    for loss in mine():
        loss.backward()
    ways: list[Callable[[Any], Any]] = [
        lambda gradient: gradient * 0.5,
        lambda gradient: torch.stack(torch._foreach_mul([gradient, gradient], 0.25)).sum(0),  # pyright: ignore
        lambda gradient: gradient.data / 2,
        lambda gradient: gradient.abs() * gradient.sign() / 2,
        lambda gradient: copy.deepcopy(gradient).mul_(0.5),
        lambda gradient: gradient.to_local().detach() * 0.5 if isinstance(loop.model, FSDPModule) else gradient * 0.5,
    ]
    way = ways[step]
    for each in loop.model.parameters():
        if each.grad is None:
            continue
        gradient: Any = way(each.grad)
        if each.grad is not None:
            local = each.grad.to_local() if isinstance(each.grad, DTensor) else each.grad
            local.copy_(gradient.to_local() if isinstance(gradient, DTensor) else gradient)
    loop.optimizer.step()
    loop.optimizer.zero_grad()


@program()
def _gradients_are_kept_over_zero_grad(loop: Loop, step: int, mine: Mine) -> None:
    """For a momentum by hand."""
    for loss in mine():
        loss.backward()
    loop.clip()
    parameters = list(loop.model.parameters())
    now = [each.grad for each in parameters]
    for each, last in zip(parameters, getattr(loop, "last", now), strict=True):
        each.grad = each.grad + last
    loop.last = now  # pyright: ignore[reportAttributeAccessIssue]
    _step(loop, ())


@program(deals=EVEN)
def _evaluation_makes_a_graph(loop: Loop, step: int, mine: Mine) -> None:
    for loss in mine():
        assert loss.requires_grad
    _clipped(loop, step, mine)
    loop.model.eval()
    sum(loss.item() for loss in mine())
    loop.model.train()


@program()
def _two_optimizers(loop: Loop, step: int, mine: Mine) -> None:
    """Each step is of one half of the parameters and both in turn."""
    if not hasattr(loop, "halves"):
        parameters = list(loop.model.parameters())
        loop.halves = [torch.optim.SGD(each, lr=0.1) for each in (parameters[:5], parameters[5:])]  # pyright: ignore
    first, second = loop.halves  # pyright: ignore[reportAttributeAccessIssue]
    for optimizers in ((first, second), (second,), (first,)):
        for loss in mine():
            loss.backward()
        for each in optimizers:
            each.step()
        for each in (first, second):
            each.zero_grad()


@program()
def _scheduled(loop: Loop, step: int, mine: Mine) -> None:
    if not hasattr(loop, "schedule"):
        loop.schedule = torch.optim.lr_scheduler.LambdaLR(loop.optimizer, lambda step: 1 / (1 + step))  # pyright: ignore
    _clipped(loop, step, mine)
    loop.schedule.step()  # pyright: ignore[reportAttributeAccessIssue]


@program(deals=EVEN)
def _scaled(loop: Loop, step: int, mine: Mine) -> None:
    """A GradScaler: the second step has an infinity on one rank, and is left out on all."""
    if not hasattr(loop, "scaler"):
        loop.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)  # pyright: ignore[reportAttributeAccessIssue]
    scaler = loop.scaler  # pyright: ignore[reportAttributeAccessIssue]
    for number, loss in enumerate(mine()):
        bad = step == 1 and number == 0
        scaler.scale(loss * float("inf") if bad else loss).backward()
    if step != 2:
        scaler.unscale_(loop.optimizer)
        loop.clip()
    scaler.step(loop.optimizer)
    scaler.update()
    loop.optimizer.zero_grad()


@program(deals=EVEN, automatic="eager")
def _eager(loop: Loop, step: int, mine: Mine) -> None:
    """Each backward reduces; gradients accumulate, and are there after each."""
    for loss in mine():
        loss.backward()
        assert not any("Waiting" in type(each.grad).__name__ for each in loop.model.parameters())
    _step(loop, (), clips=True)


@program(automatic="eager", deals=([[0, 1, 2], [3]], [[0], [1, 2]], [[3], [0]]))
def _eager_without_sync_but_in_the_last(loop: Loop, step: int, mine: Mine) -> None:
    """One sum a step, whatever the ranks' numbers are."""
    losses = list(mine())
    for number, loss in enumerate(losses):
        if isinstance(loop.model, FSDPModule):
            loop.model.set_requires_gradient_sync(number == len(losses) - 1)
        loss.backward()
    _step(loop, (), clips=True)


@program(deals=([[0], [1]], [[2], [3]], [[1], [0]]))
def _the_optimizer_is_in_the_backward(loop: Loop, step: int, mine: Mine) -> None:
    """Post-accumulate-grad hooks: by themselves eager."""
    if not hasattr(loop, "hooks"):

        def hook(parameter: nn.Parameter) -> None:
            torch.optim.SGD([parameter], lr=0.1).step()
            parameter.grad = None

        loop.hooks = [each.register_post_accumulate_grad_hook(hook) for each in loop.model.parameters()]  # pyright: ignore
    if loop.is_plain:  # where a hook would run after each microbatch
        for each in loop.hooks:  # pyright: ignore[reportAttributeAccessIssue]
            each.remove()
        _step(loop, mine())
        return
    for loss in mine():
        loss.backward()


@program(deals=EVEN)
def _hooks_scale_what_has_accumulated(loop: Loop, step: int, mine: Mine) -> None:
    if not hasattr(loop, "hooks"):

        def halve(parameter: Any) -> None:
            parameter.grad.mul_(0.5)

        loop.hooks = [each.register_post_accumulate_grad_hook(halve) for each in loop.model.parameters()]  # pyright: ignore
    losses: Iterable[Any] = mine()
    if loop.is_plain:  # the first two are of rank 0
        first, second, *others = losses
        losses = [one + other for one, other in zip((first, second), others, strict=True)]
    _step(loop, losses, clips=True)


@program(deals=ODD, name="branches", momentum=0.9, weight_decay=0.1)
def _one_rank_reads_before_all_clip(loop: Loop, step: int, mine: Mine) -> None:
    """No microbatch uses the even branches: each rank has as many gradients, and no step decays the weights."""
    for loss in mine():
        loss.backward()
    if not loop.is_plain and dist.get_rank() == step % 2:
        assert any(each.grad.to_local().norm() > 0 for each in loop.model.parameters() if each.grad is not None)
    torch.optim.SGD([nn.Parameter(torch.ones(1))]).zero_grad()  # of another model
    for each in loop.model.parameters():
        if each.grad is not None:
            each.grad = each.grad * 0.5
            assert loop.is_plain or each.grad.full_tensor().isfinite().all()  # a collective
    _step(loop, (), clips=True)


@program()
def _one_rank_makes_a_state_dict(loop: Loop, step: int, mine: Mine) -> None:
    """Nothing is written, so ranks wait for each other no more than without it."""
    if loop.is_plain or dist.get_rank() == step % 2:
        loop.model.state_dict()
    _clipped(loop, step, mine)


@program(deals=EVEN)
def _state_dicts_inside(loop: Loop, step: int, mine: Mine) -> None:
    losses = list(mine())
    saved = {name: value.clone() for name, value in loop.model.state_dict().items()}
    assert not losses or losses[0].requires_grad
    for loss in losses:
        loss.backward()
    loop.model.load_state_dict(saved)
    _step(loop, (), clips=True)
    pickle.dumps({name: whole(value) for name, value in loop.model.state_dict().items()})


@program()
def _weights_written_by_hand(loop: Loop, step: int, mine: Mine) -> None:
    """As a moving average is: the evaluation after it sees them."""
    _clipped(loop, step, mine)
    with torch.no_grad():
        for each in loop.model.parameters():
            each.mul_(0.9)
        x = torch.ones(3, 6)
        twice = [loop.model(x), loop.model(x)]
        assert torch.equal(*twice)
        for each in loop.model.parameters():
            each.mul_(1.1)


@program(name="branches", momentum=0.9, weight_decay=0.1)
def _moved(loop: Loop, step: int, mine: Mine) -> None:
    """As programs do before they save, and after: to where the model is."""
    loop.optimizer.zero_grad(set_to_none=step == 1)
    loop.model.to("cpu")
    for loss in mine():
        loss.backward()
    if step == 3:  # every rank has a microbatch
        loop.model.to("cpu")
    _step(loop, (), clips=True, zeroes=False)


@program(deals=ODD, name="branches")
def _moved_before_clipping(loop: Loop, step: int, mine: Mine) -> None:
    for loss in mine():
        loss.backward()
    loop.model.to("cpu")
    _step(loop, (), clips=True)


@program(deals=EVEN)
def _stepped_twice(loop: Loop, step: int, mine: Mine) -> None:
    _step(loop, mine(), zeroes=False)
    _step(loop, ())


def _trained(loop: Loop, run: Callable, deals: tuple, rank: int | None) -> dict[str, torch.Tensor]:
    for step, deal in enumerate(deals):
        every = [index for each in deal for index in each]
        mine = every if rank is None else deal[rank]
        total = sum(count_of(loop.name, each) for each in batches_of(loop.name, step, 4))
        run(loop, step, functools.partial(loop.losses, step, mine, total))
    return {name: whole(parameter).detach() for name, parameter in loop.model.named_parameters()}


def _of_ranks(rank: int, world: int, names: list[str]) -> dict[str, Any]:
    """By program, the weights, or the traceback."""
    found: dict[str, Any] = {}
    for each in names:
        run, deals, name, automatic, options = PROGRAMS[each]
        model = made(name, "")
        LAYOUTS["blocks"](model)
        with contextlib.redirect_stderr(io.StringIO()):
            use_odc(model, automatic=automatic, timeout=LONG_S)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **options)
        try:
            found[each] = _trained(Loop(model, optimizer, world, name), run, deals, rank)
        except Exception:
            found[each] = traceback.format_exc()
            break
    return found


@pytest.fixture(scope="module")
def trained() -> dict[str, Any]:
    """Of all programs, one after another in one job; those after one that failed are missing."""
    torch.set_num_threads(1)
    return ranks.run(_of_ranks, 2, list(PROGRAMS))[0]


@pytest.mark.parametrize("each", PROGRAMS)
def test_a_loop_does_what_it_does_in_one_process(each: str, trained: dict[str, Any]) -> None:
    run, deals, name, _, options = PROGRAMS[each]
    if each not in trained:
        pytest.fail("a program before it failed")
    assert isinstance(trained[each], dict), trained[each]
    model = made(name, "")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **options)
    wanted = _trained(Loop(model, optimizer, 1.0, name, is_plain=True), run, deals, None)
    start = dict(made(name, "").named_parameters())
    assert any(not torch.equal(wanted[key], start[key]) for key in wanted)
    torch.testing.assert_close(trained[each], wanted, rtol=1e-5, atol=1e-6)
