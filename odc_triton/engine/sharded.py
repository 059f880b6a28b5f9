"""What the minibatch protocol asks of what it keeps in step: a parameter (parameter.py), or, of a model of torch's own
`fully_shard`, the parameters of a unit together (fsdp2/unit.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import nn


class Lands(Protocol):
    """`p.grad`: nothing inside a minibatch, the landed gradient after it.

    `touched`: this rank added to it in this minibatch; `dirty`: some rank did since it was zeroed. `dtype`: of the
    gradient that the optimizer gets.
    """

    touched: bool
    dirty: bool
    dtype: torch.dtype
    has_gradient: bool
    """Whether the optimizer has one to take."""

    def expect_gradient(self) -> None:
        """Inside a minibatch: using `p.grad` raises."""

    def expect_no_more(self) -> bool:
        """The minibatch ends. Returns whether `p.grad` was assigned inside it; that value is dropped."""

    def drop(self) -> None:
        """The minibatch failed: there is no gradient, and what some rank may have added is zeroed next."""

    def check_memory(self, name: str) -> None:
        """Raises RuntimeError when something replaced the memory under it."""

    def own_sum(self) -> torch.Tensor:
        """This rank's part of the sum, to sum over replicas."""

    def own_gradient(self, own_sum: torch.Tensor) -> torch.Tensor:
        """`own_sum` as a floating-point number, to divide and to step with."""

    def land(self, gradient: torch.Tensor | None) -> None:
        """Hands the landed gradient to the optimizer; None if no rank contributed."""


class Sharded(Protocol):
    """`optimized`: what optimizers hold of it. `is_split`: whether each replica steps and publishes only its part of a
    shard. `trains`: whether it has a gradient.
    """

    name: str
    landing: Lands
    trains: bool
    is_split: bool
    optimized: Sequence[nn.Parameter]

    def follow_requires_grad(self) -> None:
        """Before a minibatch: raises RuntimeError for what has changed and can't be followed."""

    def to_clear(self) -> torch.Tensor | None:
        """Drops its gradient; returns this rank's gradient shard if this rank must zero it."""

    def to_publish(self) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """(part of this rank's compute shard, master), to be copied after each step."""

    def wholes(self) -> list[tuple[str, torch.Tensor]]:
        """[(name, a copy of the whole tensor in the compute dtype)]."""
