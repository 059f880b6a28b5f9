"""TRL's loss in a microbatch without its collectives; its metrics are merged afterwards.

`_compute_loss` reduces and gathers metrics over ranks in every microbatch. In a minibatch ranks may have different
numbers of packs, so they must not wait for each other.

TRL has two kinds of metrics. One is a mean: it reduces [sum, count] and keeps sum / count. `Alone` keeps the pair,
and `PackMetrics` adds pairs. The other is the least or the largest of gathered values, and its name ends in _min or
_max. Both merge exactly, by name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor


class Alone:
    """Replaces accelerate's Accelerator in a minibatch: a single process, without collectives.

    `num_processes` is 1, as gradients are summed over ranks and not averaged. Other attributes raise AttributeError.
    """

    num_processes = 1
    sync_gradients = False  # else TRL would adapt `entropy_coef` after every pack

    def __init__(self, device: torch.device, *, is_main_process: bool) -> None:
        self.device = device
        self.is_main_process = is_main_process  # TRL reports its timings there
        self._pair: Tensor | None = None

    def reduce(self, tensor: Tensor, reduction: str = "sum") -> Tensor:
        self._pair = tensor.detach() if tensor.shape == (2,) else None
        return tensor

    def gather(self, tensor: Tensor) -> Tensor:
        return tensor

    gather_for_metrics = gather

    def take_pair(self) -> Tensor | None:
        """The pair that was reduced since the last call: [sum, count]."""
        pair, self._pair = self._pair, None
        return pair

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"there is no accelerator.{name} in a minibatch, where ranks may have different numbers of microbatches: "
            f"do it in _prepare_inputs, or after the step"
        )


class PackMetrics:
    """Replaces TRL's lists of metrics while packs are computed: `metrics[name].append(value)`."""

    def __init__(self, alone: Alone) -> None:
        self._alone = alone
        self.share, self.rows = 1.0, 1  # the factor of the pack's loss, and its completions
        self._means: dict[str, Tensor] = {}  # [sum, count]
        self._ends: dict[str, list[float]] = {}

    def __getitem__(self, name: str) -> _Metric:
        return _Metric(self, name)

    def add(self, name: str, value: float) -> None:
        pair = self._alone.take_pair()
        if pair is None and name.endswith(("_min", "_max")):
            self._ends.setdefault(name, []).append(value)
            return
        if name == "policy_loss":
            pair = torch.tensor([self.share * value, 0.0])  # a part of a sum over packs
        if pair is None:  # a router's auxiliary loss, or a user's own metric: its mean over completions
            pair = torch.tensor([0.0, 0.0] if math.isnan(value) else [value * self.rows, self.rows])
        pair = pair.double().cpu()
        self._means[name] = self._means[name] + pair if name in self._means else pair

    def report(self) -> dict[str, Any]:
        """This rank's metrics for `merged`, as JSON."""
        ends = {name: _end(name, values) for name, values in self._ends.items()}
        return {"means": {name: pair.tolist() for name, pair in self._means.items()}, "ends": ends}


class _Metric:
    def __init__(self, metrics: PackMetrics, name: str) -> None:
        self._metrics, self._name = metrics, name

    def append(self, value: float) -> None:
        self._metrics.add(self._name, value)


def merged(reports: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """The metrics of the minibatch, from all ranks' `PackMetrics.report()`. NaN if no rank has a value."""
    pairs: dict[str, tuple[float, float]] = {}
    ends: dict[str, list[float]] = {}
    for each in reports:
        for name, (total, count) in each["means"].items():
            before = pairs.get(name, (0.0, 0.0))
            pairs[name] = before[0] + total, before[1] + count
        for name, value in each["ends"].items():
            ends.setdefault(name, []).append(value)
    means = {name: total / max(count, 1.0) for name, (total, count) in pairs.items()}
    return means | {name: _end(name, values) for name, values in ends.items()}


def _end(name: str, values: list[float]) -> float:
    """The least or the largest; NaN, of completions without tokens, does not count."""
    some = [value for value in values if not math.isnan(value)]
    if not some:
        return math.nan
    return min(some) if name.endswith("_min") else max(some)
