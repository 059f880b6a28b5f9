"""Runs one operator in real minibatches on all ranks, one candidate after the other, and checks and times each."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from ...engine.api import engine_of
from ...engine.minibatch import minibatch
from ...nn.choice import Choice, Entry, as_choice
from ...sharding.shard_module import fully_shard
from .workload import Workload

# A candidate may differ from the shipped choice in the order of sums and, in 16 bits, in the rounding of products.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


@dataclass(kw_only=True)
class Measured:
    """Seconds of a forward and a backward, by candidate and round, and reasons why other candidates were refused."""

    rounds: dict[str, list[float]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


class Trial:
    """A separate layer, sharded over the mesh, on which one workload runs. Collective, as are its methods."""

    def __init__(
        self, workload: Workload, *, mesh: DeviceMesh, dtype: torch.dtype, backend: str, timeout: timedelta
    ) -> None:
        torch.manual_seed(0)
        self.workload, self.dtype = workload, dtype
        policy = MixedPrecisionPolicy(param_dtype=dtype)
        self.layer: nn.Module = fully_shard(
            workload.layer().train(), mesh=mesh, mp_policy=policy, backend=backend, timeout=timeout
        )
        self.engine = engine_of(self.layer)

    def measure(self, candidates: Mapping[str, Choice], *, tokens: int, rounds: int) -> Measured:
        """Times every candidate by the slowest rank, in rounds that run one candidate after the other.

        Results are compared with the first candidate's. One that raises or differs on some rank is refused on all.
        """
        inputs = self.workload.inputs(tokens, self.dtype, self.engine.heap.device, seed=self.engine.rank)
        measured = Measured()
        reference: list[torch.Tensor] | None = None
        for name, choice in candidates.items():
            found, wrong = self._results(choice, inputs)
            if wrong is None and reference is not None:
                wrong = _difference(found, reference, _TOLERANCE[self.dtype])
            if why := self._of_any_rank(wrong):
                measured.refused[name] = why
            elif reference is None:
                reference = found
        measured.rounds = {name: [] for name in candidates if name not in measured.refused}
        order = list(measured.rounds)
        for number in range(rounds + 1 if order else 0):  # the first warms up
            for name in order:
                took_s = self._time(candidates[name], inputs)
                if number:
                    measured.rounds[name].append(took_s)
            order.append(order.pop(0))
        return measured

    def pull_s(self, *, rounds: int) -> float:
        """Seconds for the slowest rank to gather the layer's parameters; 0 if they are views of shared memory."""
        if not self.engine.heap.apart or self.workload.operator in ("embedding", "log_probs"):
            return 0.0
        took = []
        with minibatch(self.layer):
            for _ in range(rounds + 1):
                self.layer.reshard()
                self._start()
                start_s = time.perf_counter()
                self.layer.unshard()
                self.engine.drain("gathering")
                took.append(self._slowest(time.perf_counter() - start_s))
            self.layer.reshard()
        return statistics.median(took[1:])

    def _run(self, choice: Choice, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        entry = Entry(operator=self.workload.operator, choice=choice)
        # The gathered choice of qkv means separate products for q, k and v.
        linear = Entry(operator="linear", choice=as_choice(f"eager/gathered/{choice.wgrad}"))
        for parameter in self.engine.parameters:
            parameter.table = (entry, linear)
        output = self.workload.call(self.layer, inputs)
        output.backward(torch.ones_like(output) / output.numel())
        return output.detach()

    def _results(self, choice: Choice, inputs: tuple[torch.Tensor, ...]) -> tuple[list[torch.Tensor], str | None]:
        """The output, this rank's gradient shards and the input's gradient; or the error raised."""
        for each in inputs:
            each.grad = None
        try:
            with minibatch(self.layer):
                output = self._run(choice, inputs)
        except Exception as error:  # including errors of a compiler or a device
            return [], f"{type(error).__name__}: {error}".splitlines()[0]
        landed = [parameter.sharded.grad for parameter in self.engine.parameters]
        shards = [gradient.to_local().clone() for gradient in landed if gradient is not None]
        self.layer.zero_grad()
        return [output, *shards, *(each.grad for each in inputs if each.grad is not None)], None

    def _of_any_rank(self, wrong: str | None) -> str | None:
        reasons = [theirs["wrong"] for theirs in self.engine.barrier.exchange("tune: a result", {"wrong": wrong})]
        return next((f"rank {rank}: {why}" for rank, why in enumerate(reasons) if why), None)

    def _time(self, choice: Choice, inputs: tuple[torch.Tensor, ...]) -> float:
        with minibatch(self.layer):
            self._start()
            start_s = time.perf_counter()
            self._run(choice, inputs)
            self.engine.drain("measuring")
            took_s = time.perf_counter() - start_s
        self.layer.zero_grad()
        return self._slowest(took_s)

    def _start(self) -> None:
        """All ranks start measuring together: they leave the barrier within 2% of the time that they waited."""
        self.engine.barrier.exchange("tune: start", {})

    def _slowest(self, seconds: float) -> float:
        messages = self.engine.barrier.exchange("tune: seconds", {"seconds": seconds})
        return max(theirs["seconds"] for theirs in messages)


def _difference(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], tolerance: float) -> str | None:
    """The error of a candidate's tensors; None if each is within the tolerance, relative to its norm."""
    if [each.shape for each in found] != [each.shape for each in wanted]:
        return "its tensors have other shapes than the shipped way's"
    for got, want in zip(found, wanted, strict=True):
        error, scale = (got.double() - want.double()).norm().item(), want.double().norm().item()
        if not error <= tolerance * max(scale, 1e-30):
            return f"its result differs from the shipped way's by {error / max(scale, 1e-30):.1e} relative to the norm"
    return None
