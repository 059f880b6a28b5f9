"""TRL's loss in a microbatch without its collectives; its metrics are merged afterwards.

`_compute_loss` reduces and gathers metrics over ranks in every microbatch. In a minibatch ranks may have different
numbers of packs, so they must not wait for each other.

TRL has two kinds of metrics. One is a mean: it reduces [sum, count] and keeps sum / count. `Alone` keeps the pair,
and `PackMetrics` adds pairs; where TRL keeps a mean without such a pair, the trainer says what it is over. The other is
the least or the largest of gathered values, and its name ends in _min or _max, or begins with it. Both merge exactly,
by name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ...step import StepPart

MINORS, GET_TRL = ("1.15", "1.16"), 'pip install "odc-triton[trl]"'
TRL = " or ".join(MINORS)


def check_version(name: str) -> None:
    """Raises ImportError for another TRL than our trainer `name` is written for."""
    import trl

    if ".".join(trl.__version__.split(".")[:2]) not in MINORS:
        raise ImportError(f"{name} is written for TRL {TRL}, and {trl.__version__} is here: {GET_TRL}")


def check_given(name: str, args: Any, config: type, share_prefixes: str) -> None:
    """Raises as `check_version`, TypeError for `args` that are not of TRL's class `config`, ValueError for unknown
    words in `share_prefixes`.
    """
    check_version(name)
    if not isinstance(args, config):
        raise TypeError(f"args is a {type(args).__name__}; give a trl.{config.__name__}")
    if share_prefixes not in ("auto", "off"):
        raise ValueError(f"share_prefixes is {share_prefixes!r}: give 'auto' or 'off'")


class Alone:
    """Replaces accelerate's Accelerator in a minibatch: a single process, without collectives.

    `num_processes` is 1, as gradients are summed over ranks and not averaged. Other attributes raise AttributeError.
    """

    num_processes = 1
    sync_gradients = False  # else TRL would adapt `entropy_coef` after every pack

    def __init__(self, accelerator: Any) -> None:
        self.device = accelerator.device
        self.is_main_process = accelerator.is_main_process  # TRL reports its timings there
        self.autocast, self.unwrap_model = accelerator.autocast, accelerator.unwrap_model
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


class PackMetrics(StepPart):
    """Replaces TRL's lists of metrics while packs are computed: `metrics[name].append(value)`. Those of all ranks are
    appended to `lists`, TRL's, in the step's barrier.

    rows: of the pack, which means are over; counts: by name what others are over. Nothing is kept of a mean over 0.
    """

    def __init__(self, alone: Alone, lists: Any) -> None:
        self._alone, self._lists = alone, lists
        self.share = 1.0  # the factor of the pack's loss
        self.rows, self.counts = 1, {}
        self.minibatch()

    def minibatch(self) -> None:
        self._means: dict[str, Tensor] = {}  # [sum, count]
        self._ends: dict[str, list[float]] = {}

    def __getitem__(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(append=partial(self.add, name))

    def __setitem__(self, name: str, values: list[float]) -> None:
        """TRL's running total of tokens, which the trainer counts after the step."""

    def add(self, name: str, value: float) -> None:
        pair = self._alone.take_pair()
        if pair is None and _ends(name) & {"min", "max"}:
            self._ends.setdefault(name, []).append(value)
            return
        if name == "policy_loss":
            pair = torch.tensor([self.share * value, 0.0])  # a part of a sum over packs
        if pair is None:  # also a router's auxiliary loss, or a user's own metric
            if not (count := self.counts.get(name, self.rows)):
                return
            pair = torch.tensor([0.0, 0.0] if math.isnan(value) else [value * count, count], dtype=torch.float64)
        pair = pair.double().cpu()
        self._means[name] = self._means[name] + pair if name in self._means else pair

    def report(self) -> dict[str, Any]:
        """This rank's metrics for `merged`, as JSON."""
        ends = {name: _end(name, values) for name, values in self._ends.items()}
        return {"means": {name: pair.tolist() for name, pair in self._means.items()}, "ends": ends}

    def settle(self, reports: list[Any]) -> None:
        for name, value in merged(reports).items():
            self._lists[name].append(value)


@contextmanager
def alone(trainer: Any, mode: str) -> Iterator[PackMetrics]:
    """While packs are computed, the loss of TRL's `trainer` runs no collective, and metrics are kept for merging, as a
    part of the step.
    """
    accelerator, metrics = trainer.accelerator, trainer._metrics[mode]
    trainer.accelerator = replaced = Alone(accelerator)
    trainer._metrics[mode] = kept = PackMetrics(replaced, metrics)
    try:
        yield kept
    finally:
        trainer.accelerator, trainer._metrics[mode] = accelerator, metrics


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


def _ends(name: str) -> set[str]:
    """Its first and last words, of which one is min or max if it is the least or the largest of gathered values."""
    words = name.split("_")
    return {words[0], words[-1]}


def _end(name: str, values: list[float]) -> float:
    """The least or the largest; NaN, of completions without tokens, does not count."""
    some = [value for value in values if not math.isnan(value)]
    if not some:
        return math.nan
    return min(some) if "min" in _ends(name) else max(some)
