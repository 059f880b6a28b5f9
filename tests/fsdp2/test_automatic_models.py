"""`use_odc(automatic=…)` on models and evaluations of other kinds: numbers are those of one process of plain torch."""

from __future__ import annotations

import contextlib
import functools
import io
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from odc_triton import use_odc
from tests.support import ranks
from tests.support.bridged import Branches
from tests.support.deadlines import LONG_S


class _Tied(nn.Module):
    """Two units with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 6, bias=False), nn.Linear(6, 6), nn.Linear(6, 6, bias=False)])

    def tie(self) -> None:
        self.blocks[2].weight = self.blocks[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.relu(block(x))
        return x


class _Scored(Branches):
    def score(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward(x).square()


class _Recomputed(Branches):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return self.head(x)


Case = Callable[[bool, Callable[[int], list[torch.Tensor]]], list[Any]]


def _made(kind: Callable[[], Any], is_plain: bool, *, automatic: Any = True, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = kind()
    if not is_plain:
        for block in model.blocks:
            fully_shard(block, **options)
        fully_shard(model, **options)
        if hasattr(model, "score"):
            register_fsdp_forward_method(model, "score")
        with contextlib.redirect_stderr(io.StringIO()):
            use_odc(model, automatic=automatic, timeout=LONG_S)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def _learn(output: torch.Tensor, is_plain: bool) -> None:
    """Gradients are divided by the number of ranks."""
    (output.sum() * (1 if is_plain else 2)).backward()


def _norm(model: nn.Module) -> float:
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()


def _norms(model: nn.Module, optimizer: Any, is_plain: bool, batches: Callable, forward: Callable) -> list[Any]:
    seen = []
    for step in range(3):
        for x in batches(step):
            _learn(forward(x), is_plain)
        seen.append(_norm(model))
        optimizer.step()
        optimizer.zero_grad()
    return seen


def _tied(is_plain: bool, batches: Callable, when: str) -> list[Any]:
    model, _ = _made(_Tied, is_plain)
    model.tie()
    if not is_plain and when == "before":
        torch.manual_seed(0)
        model = _Tied()
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        model.tie()
        use_odc(model, automatic=True, timeout=LONG_S)
    return _norms(model, torch.optim.SGD(model.parameters(), lr=0.1), is_plain, batches, lambda x: model(x).square())


def _by_a_forward_method(is_plain: bool, batches: Callable) -> list[Any]:
    model, optimizer = _made(_Scored, is_plain)
    return _norms(model, optimizer, is_plain, batches, model.score)


def _recomputed_by_reentrant_backwards(is_plain: bool, batches: Callable) -> list[Any]:
    model, _ = _made(_Recomputed, is_plain, automatic="eager")
    for x in batches(1):
        _learn(model(x).square(), is_plain)
    return [_norm(model)]


def _evaluated(is_plain: bool, batches: Callable, options: dict[str, Any]) -> list[Any]:
    """An evaluation before a minibatch, which one rank joins without a microbatch, and one inside of it."""
    model, optimizer = _made(Branches, is_plain, **options)
    seen = []
    for step in range(3):
        for inside in (False, True):
            with torch.no_grad():
                seen.append(model(torch.ones(3, 6)).sum().item())
            for x in batches(step) if not inside else ():
                _learn(model(x).square(), is_plain)
        seen.append(_norm(model))
        optimizer.step()
        optimizer.zero_grad()
    return seen


def _written(is_plain: bool, batches: Callable, write: Callable[[list[nn.Parameter]], Any]) -> list[Any]:
    """Weights as a moving average's are swapped in, evaluated."""
    model, _ = _made(Branches, is_plain)
    seen = []
    with torch.no_grad():
        for _ in range(2):
            seen.append(model(torch.ones(3, 6)).sum().item())
            write(list(model.parameters()))
            seen.append(model(torch.ones(3, 6)).sum().item())
    return seen


def _failed_then_zeroed(is_plain: bool, batches: Callable) -> list[Any]:
    """A microbatch that raises fails its minibatch; gradients are then zeroed in place, and the next step works."""
    model, optimizer = _made(Branches, is_plain)
    for x in () if is_plain else batches(1):
        with contextlib.suppress(RuntimeError):
            _learn(model(x if torch.distributed.get_rank() else torch.ones(3, 5)), is_plain)
    with contextlib.suppress(RuntimeError):
        optimizer.step() if not is_plain else None
    for _ in range(2):
        optimizer.zero_grad(set_to_none=False)
    for x in batches(0):
        _learn(model(x).square(), is_plain)
    return [_norm(model)]


CASES: dict[str, Case] = {
    "tied before": functools.partial(_tied, when="before"),
    "tied after": functools.partial(_tied, when="after"),
    "a forward method": _by_a_forward_method,
    "reentrant checkpoints, eager": _recomputed_by_reentrant_backwards,
    "evaluations": functools.partial(_evaluated, options={}),
    "evaluations of what stays whole": functools.partial(_evaluated, options={"reshard_after_forward": False}),
    "p.data.mul_": functools.partial(_written, write=lambda every: [each.data.mul_(0.5) for each in every]),
    "foreach": functools.partial(_written, write=lambda every: torch._foreach_mul_(every, 0.5)),  # pyright: ignore
}
if hasattr(FSDPModule, "reset_iter_state"):  # torch before 2.13 can't reset FSDP2
    CASES["zeroed after a failure"] = _failed_then_zeroed


def _batches(rank: int | None) -> Callable[[int], list[torch.Tensor]]:
    """Of a step: in step 1 each rank has one microbatch, in others rank 0 two and rank 1 none."""

    def of_step(step: int) -> list[torch.Tensor]:
        both = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(step)).unbind()
        return [*(both if rank is None else both[rank : rank + 1] if step == 1 else both if rank == 0 else ())]

    return of_step


def _of_ranks(rank: int, world: int, names: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in names:
        try:
            found[name] = CASES[name](False, _batches(rank))
        except Exception:
            return found | {name: traceback.format_exc()}
    return found


@pytest.fixture(scope="module")
def seen() -> list[dict[str, Any]]:
    return ranks.run(_of_ranks, 2, list(CASES))


@pytest.mark.parametrize("name", CASES)
def test_numbers_are_those_of_one_process(name: str, seen: list[dict[str, Any]]) -> None:
    wanted = CASES[name](True, _batches(None))
    for of_rank in seen:
        assert of_rank.get(name, "one before it failed") == pytest.approx(wanted, rel=1e-5)
