"""Programs that don't know of odc-triton: each FSDP2 model of theirs gets `use_odc(automatic=…)` at its first forward.

What `use_odc` refuses goes on by FSDP2's own collectives, and the program is told why.
"""

from __future__ import annotations

import os
import sys
import weakref
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..base.deadlines import Timeout
from ..base.errors import DeadlineExceeded, RankLost, RanksDiffer, in_a_line
from .automatic import Automatic, Counts, how_of
from .bridge import convert
from .found import ModuleOfFsdp, comms_of, has_run, roots_of
from .noticed import ZEROING, Noticing


@dataclass
class ProgramReport:
    """`trained`: by model, what its minibatches came to; `refused`: (model, why it stayed on plain FSDP2);
    `own`: models that the program itself gave to use_odc."""

    trained: list[tuple[str, Counts]] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)
    own: list[str] = field(default_factory=list)

    @property
    def has_trained(self) -> bool:
        return bool(self.own) or any(counts.minibatches for _, counts in self.trained)

    def __str__(self) -> str:
        lines = [
            f"{name} {'trained' if counts.minibatches else 'ran'} by on-demand communication, {counts}"
            for name, counts in self.trained
        ]
        lines += [f"{name} by plain FSDP2" for name, _ in self.refused]
        lines += [f"{name} by the program's own use_odc" for name in self.own]
        return "; ".join(lines) or "no model of FSDP2 ran in this process, so nothing was changed"


def say(text: object) -> None:
    """A line of rank 0's on stderr."""
    if os.environ.get("RANK", "0") == "0":
        print(f"odc-triton: {text}", file=sys.stderr, flush=True)


class Unmodified:
    """Inside of it, FSDP2 models of this process train by on-demand communication, from their first forward on.

        with Unmodified() as report:
            main()

    A rank that runs no forward in its first step joins the others at `zero_grad()` of the optimizer or model. `eager`:
    as in `use_odc(automatic="eager")`. `timeout`: as there. `strict`: what can't be trained so raises, instead of
    staying on plain FSDP2. On all ranks or on none. Raises RuntimeError inside of another.
    """

    def __init__(self, *, eager: bool = False, strict: bool = False, timeout: Timeout = timedelta(minutes=30)) -> None:
        self._timeout = timeout
        self._automatic, self._strict = "eager" if eager else True, strict
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # and what is in them
        self._trained: weakref.WeakSet[Automatic] = weakref.WeakSet()
        self._steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._is_launched = "RANK" in os.environ
        self.report = ProgramReport()

    def __enter__(self) -> ProgramReport:
        if "__call__" in vars(FSDPModule):
            raise RuntimeError(
                "FSDP2 models of this process train by on-demand communication already, by odc_triton.run or a plugin: "
                "leave one of them out"
            )
        follow: Any = torch.compiler.disable(self._follow)

        def call(module: Any, *args: Any, **given: Any) -> Any:
            follow(module)
            own: Any = super(FSDPModule, module)  # transformers' layers had one
            return own.__call__(*args, **given)

        # Not a forward pre-hook: hooks that it adds to the module would not run in this call.
        FSDPModule.__call__ = call  # pyright: ignore[reportAttributeAccessIssue]
        self.noticing = [Noticing(self, *each) for each in ZEROING]
        self._counting = register_optimizer_step_post_hook(self._count)
        return self.report

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del FSDPModule.__call__  # pyright: ignore[reportAttributeAccessIssue]
        self._counting.remove()
        for each in (self, *self._trained):
            for noticing in each.noticing:
                noticing.stop()

    def before_zero_grad(self, of: Optimizer | nn.Module) -> None:
        """All ranks come here before the first step's forwards, which some may not have."""
        groups = of.param_groups if isinstance(of, Optimizer) else [{"params": of.parameters()}]
        roots = roots_of(each for group in groups for each in group["params"])
        if len(roots) == 1:  # several may be units without their root
            self._follow(roots[0])

    def after_zero_grad(self, of: Optimizer | nn.Module) -> None: ...

    def _count(self, optimizer: Optimizer, *_: Any) -> None:
        known = self._steps or self.report.trained or self.report.refused or self.report.own
        # That of an FSDP2 model comes before its first forward where a checkpoint's states are loaded.
        if not known and not roots_of(each for group in optimizer.param_groups for each in group["params"]):
            say(
                "no model of torch's fully_shard has run before this first optimizer step: DDP and FSDP1 are left as "
                "they are, and accelerate uses FSDP2 on GPUs only"
            )
        self._steps[optimizer] = self._steps.get(optimizer, 0) + 1

    def _follow(self, module: nn.Module) -> None:
        if module in self._known:
            return
        roots = roots_of(module.parameters())
        for root in roots:
            self._known.update(root.modules())
        if roots and getattr(roots[0], "_odc_engine", None) is not None:
            self.report.own.append(_name(roots[0]))
        elif roots:
            self._convert(roots[0], self._obstacle(module, roots[0]))

    def _obstacle(self, module: nn.Module, root: ModuleOfFsdp) -> str | None:
        """Why this model, of which `module` is called, can't be converted now."""
        if dist.is_initialized() and dist.get_world_size() > 1 and not self._is_launched:
            return "the program starts its ranks itself: start them by torchrun or accelerate launch"
        if module is not root and has_run(root):  # FSDP2 has made the root whole
            return "a method of register_fsdp_forward_method runs first: call use_odc(model, automatic=True) before it"
        frame, around = sys._getframe(1), None
        while frame is not None:
            caller = frame.f_locals.get("self")
            if isinstance(caller, nn.Module) and not isinstance(caller, FSDPModule):
                around = caller
            frame = frame.f_back
        if around is not None and len(roots_of(around.parameters())) > 1:
            self._known.update(around.modules())
            return f"units of {type(around).__name__} are sharded and it is not: call fully_shard on it, too"
        return None

    def _convert(self, root: nn.Module, obstacle: str | None) -> None:
        name, comms = _name(root), comms_of(root)
        held = set(map(id, root.parameters()))
        steps = [
            count
            for optimizer, count in self._steps.items()
            if held & {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        ]
        try:
            if obstacle is not None:
                raise ValueError(obstacle)
            told = {"optimizer steps before the first forward, without zero_grad()": sum(steps)}
            convert(root, automatic=how_of(self._automatic), timeout=self._timeout, told=told)
        except Exception as error:
            self.report.refused.append((name, why := in_a_line(error)))
            is_plain = all(mine is before for mine, before in zip(comms_of(root), comms, strict=True))
            if self._strict or not is_plain or isinstance(error, (RankLost, DeadlineExceeded, RanksDiffer)):
                raise
            say(f"{name} trains by plain FSDP2: {why}")
            return
        automatic = vars(root)["_odc_engine"].automatic
        self._trained.add(automatic)
        self.report.trained.append((name, automatic.counts))


def _name(root: nn.Module) -> str:
    return type(root).__name__.removeprefix("FSDP")
