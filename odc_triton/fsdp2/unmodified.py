"""Programs that don't know of odc-triton: each FSDP2 model of theirs gets `use_odc(automatic=…)` at its first forward.

What `use_odc` refuses goes on by FSDP2's own collectives, and the program is told why.
"""

from __future__ import annotations

import os
import sys
import weakref
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from ..base.errors import DeadlineExceeded, RankLost, in_a_line
from .automatic import Automatic, Counts
from .bridge import use_odc
from .found import comms_of, root_of
from .zero_grad import Zeroing


@dataclass
class Report:
    """`trained`: by model, what its minibatches came to; `refused`: (model, why it stayed on plain FSDP2)."""

    trained: list[tuple[str, Counts]] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)

    @property
    def has_trained(self) -> bool:
        return any(counts.minibatches for _, counts in self.trained)

    def __str__(self) -> str:
        lines = [
            f"{name} {'trained' if counts.minibatches else 'ran'} by on-demand communication, {counts}"
            for name, counts in self.trained
        ]
        lines += [f"{name} by plain FSDP2, as {why}" for name, why in self.refused]
        return "; ".join(lines) or "no model of FSDP2 ran, so nothing was changed"


class Unmodified:
    """Inside of it, FSDP2 models of this process train by on-demand communication, from their first forward on.

        with Unmodified() as report:
            main()

    A rank that runs no forward in its first step joins the others at `optimizer.zero_grad()`. `eager`: as in
    `use_odc(automatic="eager")`. `strict`: what can't be trained so raises, instead of staying on plain FSDP2. Not to
    be nested. On all ranks or on none.
    """

    def __init__(self, *, eager: bool = False, strict: bool = False) -> None:
        self._automatic, self._strict = "eager" if eager else True, strict
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # and what is in them
        self.zeroing = Zeroing(self)
        self._trained: weakref.WeakSet[Automatic] = weakref.WeakSet()
        self.report = Report()

    def __enter__(self) -> Report:
        follow: Any = torch.compiler.disable(self._follow)

        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            follow(module)
            return nn.Module.__call__(module, *args, **kwargs)

        # Not a forward pre-hook: hooks that it adds to the module would not run in this call.
        FSDPModule.__call__ = call  # pyright: ignore[reportAttributeAccessIssue]
        self.zeroing.start()
        return self.report

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del FSDPModule.__call__  # pyright: ignore[reportAttributeAccessIssue]
        for each in (self, *self._trained):
            each.zeroing.stop()

    def before_zero_grad(self, optimizer: Optimizer) -> None:
        """All ranks come here before the first step's forwards, which some may not have."""
        root = root_of(each for group in optimizer.param_groups for each in group["params"])
        if root is not None:
            self._follow(root)

    def after_zero_grad(self, optimizer: Optimizer) -> None: ...

    def _follow(self, module: nn.Module) -> None:
        if module in self._known:
            return
        self._known.update(module.modules())
        if getattr(module, "_odc_engine", None) is None:  # else the program has called use_odc
            self._convert(module)

    def _convert(self, root: nn.Module) -> None:
        name, comms = type(root).__name__.removeprefix("FSDP"), comms_of(root)
        try:
            use_odc(root, automatic=self._automatic)  # pyright: ignore[reportArgumentType]
        except Exception as error:
            is_plain = all(mine is before for mine, before in zip(comms_of(root), comms, strict=True))
            if self._strict or not is_plain or isinstance(error, (RankLost, DeadlineExceeded)):
                raise
            self.report.refused.append((name, why := in_a_line(error)))
            if os.environ.get("RANK", "0") == "0":
                print(f"odc-triton run: {name} trains by plain FSDP2, as {why}", file=sys.stderr)
            return
        automatic = vars(root)["_odc_engine"].automatic
        self._trained.add(automatic)
        self.report.trained.append((name, automatic.counts))
