"""The targets of issue 3 for one H200, as data: which cells each is about, what it measures, its limit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .cell import Cell


@dataclass(frozen=True, kw_only=True)
class Target:
    """Reached when `value` is at least (else: at most) `limit` in every cell that it `applies` to and was timed."""

    text: str
    applies: Callable[[Cell], bool]
    value: Callable[[Cell], float | None]
    limit: float
    at_least: bool = True

    def verdict(self, cells: Sequence[Cell]) -> dict[str, object]:
        """`verdict`: reached, missed or not measured; the worst value, its cell, and how many cells had one."""
        measured = [
            (value, cell.name) for cell in cells if self.applies(cell) and (value := self.value(cell)) is not None
        ]
        if not measured:
            return {"target": self.text, "verdict": "not measured", "worst": None, "cell": "", "cells": 0}
        worst, name = (min if self.at_least else max)(measured)
        reached = worst >= self.limit if self.at_least else worst <= self.limit
        return {
            "target": self.text,
            "verdict": "reached" if reached else "missed",
            "worst": worst,
            "cell": name,
            "cells": len(measured),
        }


def ratio(*baselines: str) -> Callable[[Cell], float | None]:
    """Ours against the fastest of these: its time over ours."""

    def value(cell: Cell) -> float | None:
        found = [cell.ratios[name]["median"] for name in baselines if name in cell.ratios]
        return min(found, default=None)

    return value


def times(baseline: str) -> Callable[[Cell], float | None]:
    """Ours over the baseline's time."""
    return lambda cell: 1 / cell.ratios[baseline]["median"] if baseline in cell.ratios else None


def over_the_slower(*baselines: str) -> Callable[[Cell], float | None]:
    """Ours over the longest of these times."""

    def value(cell: Cell) -> float | None:
        if not {"ours", *baselines} <= set(cell.us):
            return None
        return cell.us["ours"]["p50"] / max(cell.us[name]["p50"] for name in baselines)

    return value


def memory_share(cell: Cell) -> float | None:
    """Peak memory of a call over what it never holds as a whole."""
    return cell.peak_bytes / cell.whole_bytes if cell.peak_bytes is not None and cell.whole_bytes else None


def _loopback(*operators: str, least_tokens: int = 0, most_tokens: int = 1 << 30) -> Callable[[Cell], bool]:
    def applies(cell: Cell) -> bool:
        named = cell.peers == "loopback" and cell.operator in operators
        return named and least_tokens <= cell.tokens <= most_tokens

    return applies


_staged = _loopback("linear staged", least_tokens=4096)
_heads = ("linear_cross_entropy", "linear_cross_entropy_grad")

TARGETS = (
    Target(
        text="staged linear of Llama-3-8B's blocks, T >= 4096: >= 0.95 of torch.mm on a local weight",
        applies=lambda cell: _staged(cell) and cell.model == "llama-3-8b" and cell.layer != "head",
        value=ratio("torch.mm"),
        limit=0.95,
    ),
    Target(
        text="direct linear, T <= 128: >= 1.0 of copy, then torch.mm",
        applies=_loopback("linear direct", "linear_dx direct", most_tokens=128),
        value=ratio("copy, torch.mm"),
        limit=1.0,
    ),
    Target(
        text="wgrad into peers: >= 1.15 of torch.mm, then an accumulation of its own (the faster of two)",
        applies=_loopback("wgrad"),
        value=ratio("torch.mm, add", "torch.mm, scatter"),
        limit=1.15,
    ),
    Target(
        text="gather, scatter: >= 0.9 of a device copy by bytes moved",
        applies=_loopback("gather", "scatter"),
        value=ratio("device copy"),
        limit=0.9,
    ),
    Target(
        text="linear_cross_entropy and its gradient, T >= 4096: peak memory <= 1/8 of the logits",
        applies=_loopback(*_heads, least_tokens=4096),
        value=memory_share,
        limit=1 / 8,
        at_least=False,
    ),
    Target(
        text="linear_cross_entropy and its gradient, T >= 4096: time <= 1.1 of its torch.mm chunks alone",
        applies=_loopback(*_heads, least_tokens=4096),
        value=times("torch.mm chunks"),
        limit=1.1,
        at_least=False,
    ),
    Target(
        text="staged linear, peers in host memory: time <= 1.15 of the longer of compute alone and link alone",
        applies=lambda cell: cell.peers == "pinned" and cell.operator == "linear staged",
        value=over_the_slower("torch.mm", "copy"),
        limit=1.15,
        at_least=False,
    ),
)


def wanted_first(cell: Cell) -> int:
    """0: what the first half hour on a GPU is for, the layers of one model under training's load; 1: what a target is
    about; 2: the others.
    """
    if cell.model == "llama-3-8b" and cell.world == 8 and cell.tokens in (0, 4096):
        return 0
    return 1 if any(target.applies(cell) for target in TARGETS) else 2
