"""Noticing `Optimizer.zero_grad` changes nothing else, and ends with whoever is told."""

from __future__ import annotations

import gc
import inspect

import torch
from torch.optim import Optimizer

from odc_triton.fsdp2.zero_grad import Zeroing


class _Listener:
    def __init__(self) -> None:
        self.heard: list[str] = []

    def before_zero_grad(self, optimizer: Optimizer) -> None:
        self.heard.append("before")

    def after_zero_grad(self, optimizer: Optimizer) -> None:
        self.heard.append("after")


def test_it_can_be_inspected() -> None:
    """accelerate passes set_to_none only to a zero_grad whose signature has it."""
    plain, listener = vars(Optimizer)["zero_grad"], _Listener()
    zeroing = Zeroing(listener)
    zeroing.start()
    parameter = torch.ones(2, requires_grad=True)
    parameter.grad = torch.ones(2)
    optimizer = torch.optim.SGD([parameter])
    assert "set_to_none" in inspect.signature(optimizer.zero_grad).parameters
    optimizer.zero_grad(set_to_none=False)
    assert parameter.grad.tolist() == [0, 0]
    assert listener.heard == ["before", "after"]
    zeroing.stop()
    assert vars(Optimizer)["zero_grad"] is plain


def test_it_ends_with_its_listener() -> None:
    plain, listener = vars(Optimizer)["zero_grad"], _Listener()
    Zeroing(listener).start()
    assert vars(Optimizer)["zero_grad"] is not plain
    del listener
    gc.collect()
    assert vars(Optimizer)["zero_grad"] is plain
