"""Several optimizers as one: for Muon, which takes matrices only, and what steps the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer


class ChainedOptimizer(Optimizer):
    """One optimizer for schedules, trainers and checkpoints that take one: its groups and states are those of all.

        optimizer = ChainedOptimizer(Muon(matrices, lr=1e-3), torch.optim.AdamW(others, lr=1e-3))

    A step steps each, in this order, and publishes the parameters once.

    optimizers: what it is made of; use only this one from then on.

    Raises ValueError for no optimizer, or a parameter in two of them.
    """

    def __init__(self, *optimizers: Optimizer) -> None:
        if not optimizers:
            raise ValueError("ChainedOptimizer was given no optimizer; give at least one")
        super().__init__([group for each in optimizers for group in each.param_groups], {})
        for each in optimizers:
            self.state.update(each.state)
        self.optimizers = optimizers
        self._share()

    def _share(self) -> None:
        """Makes groups and states the same objects here and in each optimizer, which sees the states of all."""
        self.param_groups = [group for each in self.optimizers for group in each.param_groups]
        for each in self.optimizers:
            each.state = self.state

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles, which torch's would leave without the optimizers. Each gets its own states only, as
        it may look at them before they are shared again.
        """
        made = []
        for each in self.optimizers:
            own = [parameter for group in each.param_groups for parameter in group["params"]]
            states = {parameter: self.state[parameter] for parameter in own if parameter in self.state}
            made.append((type(each), each.__getstate__() | {"state": states}))
        return super().__getstate__() | {"optimizers": made}

    def __setstate__(self, state: dict[str, Any]) -> None:
        made = state.get("optimizers", ())  # load_state_dict gives none
        super().__setstate__({name: each for name, each in state.items() if name != "optimizers"})
        if made:
            self.optimizers = tuple(kind.__new__(kind) for kind, _ in made)
            for each, (_, its_state) in zip(self.optimizers, made, strict=True):
                each.__setstate__(its_state)
            self._share()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "optimizers"):
            raise NotImplementedError("a group can't be added to ChainedOptimizer: add it to an optimizer first")
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict | {"state": {}})
        groups = iter(state_dict["param_groups"])
        for each in self.optimizers:  # which may keep the dtypes of its states, and takes all for its own
            own = [next(groups) for _ in each.param_groups]
            numbers = {number for group in own for number in group["params"]}
            states = {number: state for number, state in state_dict["state"].items() if number in numbers}
            each.load_state_dict(state_dict | {"param_groups": own, "state": states})
            self.state.update(each.state)
        self._share()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for each in self.optimizers:
            each.step()
        return loss
