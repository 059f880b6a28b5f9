"""Analysis of recorded spans: idle share, barriers, a text timeline, a trace for Perfetto, seconds by category.

A *track* is the list of all ranks' events of one variant; `tracks` maps a variant's name to its track. Where spans
overlap, every moment belongs to one of them (`_sweep`), so nothing is counted twice. Pure.
"""

from __future__ import annotations

import heapq
import json
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ...base.events import BUSY_KINDS, IDLE_KINDS, Event
from ...base.files import write_file

UNRECORDED = "unrecorded"
NOT_BUSY = (*IDLE_KINDS, UNRECORDED)
STATES = (*NOT_BUSY, *BUSY_KINDS)
_ALONE = ("lock", "gather", "scatter")  # labels of waits that are not barriers
_PURPOSES = {"enter": "its start", "leave": "its end", "sum up": "loss and norm"}  # of a minibatch's barriers, by label
_ELSEWHERE = 1 << 20  # above the ranks' numbers
Tracks = Mapping[str, Sequence[Event]]


class Interval(NamedTuple):
    """An interval of one rank's time in one state: an event's kind, or `UNRECORDED`."""

    start_s: float
    end_s: float
    state: str


class BarrierMark(NamedTuple):
    """A moment at which every rank had arrived. `microbatch` is -1 for a barrier of a whole minibatch."""

    at_s: float
    minibatch: int
    microbatch: int
    label: str


def window_s(events: Sequence[Event]) -> tuple[float, float]:
    """First start and last end over all ranks, in seconds. Raises ValueError if there are no events."""
    if not events:
        raise ValueError("there are 0 events; record at least one minibatch first")
    return min(event.start_s for event in events), max(event.end_s for event in events)


def segments(events: Sequence[Event]) -> dict[int, list[Interval]]:
    """Each rank's time as segments, gapless from first start to last end *over all ranks*, ranks ascending.

    Where spans overlap `wait` wins, then the innermost. Time without a span is `UNRECORDED`.
    """
    start_s, end_s = window_s(events)
    by_rank: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        by_rank[event.rank].append(event)
    return {rank: _flatten(by_rank[rank], start_s, end_s) for rank in sorted(by_rank)}


def _flatten(events: list[Event], start_s: float, end_s: float) -> list[Interval]:
    spans = [(e.start_s, e.end_s, (e.kind not in IDLE_KINDS, -e.start_s), e.kind) for e in events]
    flat: list[Interval] = []
    for left_s, right_s, kind in _sweep(spans, start_s, end_s):
        state = kind or UNRECORDED
        if flat and flat[-1].state == state:
            flat[-1] = flat[-1]._replace(end_s=right_s)
        else:
            flat.append(Interval(left_s, right_s, state))
    return flat


def _sweep(
    spans: Iterable[tuple[float, float, tuple[float, float], str]], start_s: float, end_s: float
) -> Iterator[tuple[float, float, str | None]]:
    """Yields intervals from `start_s` to `end_s`: (start, end, name of the running span, or None).

    spans: (start, end, priority, name), within these bounds. The lowest priority wins, of equal ones the span that
    ends first.
    """
    arriving = sorted(spans, key=lambda span: span[0], reverse=True)
    edges = sorted({start_s, end_s, *(span[0] for span in arriving), *(span[1] for span in arriving)})
    running: list[tuple[tuple[float, float], float, str]] = []
    for left_s, right_s in pairwise(edges):
        while arriving and arriving[-1][0] <= left_s:
            _, until_s, priority, name = arriving.pop()
            heapq.heappush(running, (priority, until_s, name))
        while running and running[0][1] <= left_s:
            heapq.heappop(running)
        yield left_s, right_s, running[0][2] if running else None


def idle_fraction(events: Sequence[Event]) -> float:
    """The share of the ranks' time in which they do nothing useful, 0 to 1: of that from the first start to the last
    end over all ranks, what is in no busy span or in a `wait`. Raises ValueError if there are no events.

    Pauses count: if variants ran in turn, minibatch by minibatch, pass the track through `excerpt` first.
    """
    shares = idle_of_ranks(events)
    return sum(shares.values()) / len(shares)


def idle_of_ranks(events: Sequence[Event]) -> dict[int, float]:
    """`idle_fraction` by rank: the mean of these is that."""
    start_s, end_s = window_s(events)
    idle = {n: sum(s.end_s - s.start_s for s in flat if s.state in NOT_BUSY) for n, flat in segments(events).items()}
    return {rank: min(1.0, idle_s / (end_s - start_s)) if end_s > start_s else 0.0 for rank, idle_s in idle.items()}


def barriers(events: Sequence[Event]) -> list[BarrierMark]:
    """The moments at which all ranks waited for each other, in order of time; none in a world of one.

    A barrier is a `wait` that every rank has (the n-th of the same minibatch, microbatch and label) and that
    no rank left before the last one came; waits for locks and for a rank's own bytes (labels that begin with
    "lock", "gather", "scatter") don't count. Its moment is when the last rank came.
    """
    ranks = {event.rank for event in events}
    if len(ranks) < 2:
        return []
    seen: Counter[tuple] = Counter()
    groups: dict[tuple, list[Event]] = defaultdict(list)
    for event in sorted(events, key=lambda event: event.start_s):
        if event.kind in IDLE_KINDS and not event.label.startswith(_ALONE):
            key = (event.minibatch, event.microbatch, event.label)
            seen[(event.rank, *key)] += 1
            groups[(*key, seen[(event.rank, *key)])].append(event)
    found = []
    for (minibatch, microbatch, label, _), waits in groups.items():
        last_came_s = max(wait.start_s for wait in waits)
        if len(waits) == len(ranks) and last_came_s <= min(wait.end_s for wait in waits):
            found.append(BarrierMark(last_came_s, minibatch, microbatch, label))
    return sorted(found)


def excerpt(tracks: Tracks, *, minibatches: Container[int]) -> dict[str, list[Event]]:
    """The events of `minibatches`: each track starts at 0 s, pauses between minibatches are cut out.

    A pause is time between minibatches in which no rank of the variant has an event: other variants or other
    minibatches ran then. Time within a minibatch is never cut. Raises ValueError if a variant has no event in these
    minibatches.
    """
    chosen = {}
    for name, events in tracks.items():
        wanted = sorted((e for e in events if e.minibatch in minibatches), key=lambda event: event.start_s)
        if not wanted:
            have = sorted({event.minibatch for event in events})
            raise ValueError(f"{name!r} has no event in the minibatches asked for; it has minibatches {have}")
        numbers = {event.minibatch for event in wanted}
        spans = {number: window_s([e for e in wanted if e.minibatch == number]) for number in numbers}
        cut_s: dict[int, float] = {}
        pauses_s = reached_s = wanted[0].start_s
        for minibatch, (start_s, end_s) in sorted(spans.items(), key=lambda item: item[1]):
            pauses_s += max(0.0, start_s - reached_s)
            reached_s = max(reached_s, end_s)
            cut_s[minibatch] = pauses_s
        chosen[name] = [
            replace(e, start_s=e.start_s - cut_s[e.minibatch], end_s=e.end_s - cut_s[e.minibatch]) for e in wanted
        ]
    return chosen


def headline(events: Sequence[Event]) -> list[str]:
    """Total time, idle share and barriers per step of a track, each as text; then what for, if some are not a
    minibatch's own two.
    """
    start_s, end_s = window_s(events)
    found = barriers(events)
    rate = len(found) / len({event.minibatch for event in events})
    kinds = dict.fromkeys(each.label.partition(" minibatch")[0] for each in found if " minibatch" in each.label)
    return [
        seconds_text(end_s - start_s),
        f"{idle_fraction(events):.1%} idle",
        f"{rate:.3g} barriers per step",
        *[f"for {', '.join(_PURPOSES.get(kind, kind) for kind in kinds)}"] * bool(kinds.keys() - {"enter", "leave"}),
    ]


def seconds_text(value_s: float) -> str:
    """Seconds with three digits and a unit."""
    for scale, unit in ((1, "s"), (1e3, "ms"), (1e6, "µs")):
        value = value_s * scale
        if value >= 1:
            return f"{value:,.0f} {unit}" if value >= 100 else f"{value:#.3g} {unit}"
    return "0 s"


def shares(rank: list[Interval], edges_s: np.ndarray) -> dict[str, np.ndarray]:
    """For each state, the share (0 to 1) of the time between neighbouring `edges_s` that a rank spends in it.

    `rank`: its segments, in order and not overlapping; `edges_s` (n + 1,) ascending; each result (n,).
    """
    found = {}
    for state in STATES:
        own = np.array([(s.start_s, s.end_s) for s in rank if s.state == state]).reshape(-1, 2)
        # Time spent in it, at the start and at the end of each of its segments.
        spent_s = np.cumsum(np.stack([np.zeros(len(own)), own[:, 1] - own[:, 0]], axis=1))
        at_edges_s = np.interp(edges_s, own.ravel(), spent_s) if len(own) else np.zeros(len(edges_s))
        found[state] = np.diff(at_edges_s) / np.diff(edges_s)
    return found


def whole(amounts: np.ndarray) -> np.ndarray:
    """Integers near `amounts` (n,) whose running sum stays within 0.5 of theirs: no area is lost."""
    return np.diff(np.rint(np.cumsum(amounts)), prepend=0.0).astype(int)


def timeline_text(tracks: Tracks, width: int = 100) -> str:
    """The timelines for a terminal: one row per rank, `#` busy, `.` idle, all variants on one time axis.

    `width` in characters, rank names included; at least 20. Raises ValueError for a smaller one and for a track
    without events.
    """
    if width < 20:
        raise ValueError(f"width is {width} characters; give at least 20")
    axis_s = longest_s(tracks)
    lines = []
    for name, events in tracks.items():
        lines.append(f"{name}: {', '.join(headline(events))}")
        ranks = segments(events)
        margin = max(len(f"rank {rank} ") for rank in ranks)
        edges_s = window_s(events)[0] + np.linspace(0.0, axis_s, width - margin + 1)
        for rank, flat in ranks.items():
            part = shares(flat, edges_s)
            idle = np.clip(whole(sum(part[state] for state in NOT_BUSY)), 0, 1)
            reached = sum(part.values()) >= 0.5
            row = "".join(".#"[busy] if here else " " for busy, here in zip(1 - idle, reached, strict=True))
            lines.append(f"{f'rank {rank}':<{margin}}{row}".rstrip())
    return "\n".join(lines)


def longest_s(tracks: Tracks) -> float:
    """Length of the longest track, which is the common axis; a tiny one if nothing took any time."""
    if not tracks:
        raise ValueError("there are 0 tracks to show; give at least one variant's events")
    return max(*(end_s - start_s for start_s, end_s in map(window_s, tracks.values())), 1e-9)


def chrome_trace(tracks: Tracks) -> dict:
    """The tracks in Chrome's trace event format, for ui.perfetto.dev or chrome://tracing.

    One process per variant, one thread per rank (both numbered from 1: 0 has a special meaning in viewers), one
    complete event ("X", microseconds, resolution 1 ns) per span. Every variant begins at 0, so that variants can be
    compared.
    """
    trace: list[dict] = []

    def name(kind: str, text: str, pid: int, tid: int = 1) -> None:
        trace.append({"ph": "M", "name": f"{kind}_name", "pid": pid, "tid": tid, "args": {"name": text}})
        number = {"sort_index": pid if kind == "process" else tid}
        trace.append({"ph": "M", "name": f"{kind}_sort_index", "pid": pid, "tid": tid, "args": number})

    for pid, (variant, events) in enumerate(tracks.items(), start=1):
        start_s, _ = window_s(events)
        name("process", variant, pid)
        for elsewhere, rank in sorted({(event.is_elsewhere, event.rank) for event in events}):
            name("thread", f"rank {rank}{', elsewhere' if elsewhere else ''}", pid, _thread(rank, elsewhere))
        # Viewers nest a thread's spans in file order: a parent comes before what it contains.
        for event in sorted(events, key=lambda e: (e.start_s, -e.end_s)):
            # Round both ends, not start and length: then a child never ends after its parent.
            start_ns, end_ns = (round((t - start_s) * 1e9) for t in (event.start_s, event.end_s))
            trace.append(
                {
                    "ph": "X",
                    "name": event.kind,
                    "cat": "idle" if event.kind in IDLE_KINDS else "busy",
                    "pid": pid,
                    "tid": _thread(event.rank, event.is_elsewhere),
                    "ts": start_ns / 1000,
                    "dur": (end_ns - start_ns) / 1000,
                    "args": {field: getattr(event, field) for field in ("minibatch", "microbatch", "label")},
                }
            )
    return {"traceEvents": trace, "displayTimeUnit": "ms"}


def _thread(rank: int, elsewhere: bool) -> int:
    return rank + 1 + (_ELSEWHERE if elsewhere else 0)


def save_trace(tracks: Tracks, path: str | Path) -> None:
    """Writes `chrome_trace(tracks)` as JSON. Errors as in `write_file`."""
    write_file(path, json.dumps(chrome_trace(tracks), allow_nan=False).encode())


PRODUCTS = "matrix products"
ATTENTION = "attention"
KERNELS = "our operators"
OTHER = "other compute"
OPTIMIZER = "optimizer"
ACCUMULATE = "accumulate"
GATHER = "gather"
BARRIERS = "barriers"
IDLE = "idle"
# On a GPU several streams run at a time: each moment counts for the first of these that runs, so accumulate and gather
# count only where compute does not hide them.
CATEGORIES = (PRODUCTS, ATTENTION, KERNELS, OTHER, OPTIMIZER, ACCUMULATE, GATHER, BARRIERS, IDLE)


class TimeSpan(NamedTuple):
    """Work from `start_s` to `end_s`; `category` is one of CATEGORIES except IDLE."""

    category: str
    start_s: float
    end_s: float


def nested(spans: Sequence[TimeSpan], start_s: float, end_s: float) -> dict[str, float]:
    """Seconds of each category between two moments of one thread, whose spans nest: the innermost counts."""
    return _sum_up([(-span.start_s, span.end_s) for span in spans], spans, start_s, end_s)


def overlapping(spans: Sequence[TimeSpan], start_s: float, end_s: float) -> dict[str, float]:
    """The same for one GPU, whose streams run concurrently: the category closest to compute counts."""
    return _sum_up([(CATEGORIES.index(span.category), 0.0) for span in spans], spans, start_s, end_s)


def _sum_up(
    priorities: Sequence[tuple[float, float]], spans: Sequence[TimeSpan], start_s: float, end_s: float
) -> dict[str, float]:
    seconds = dict.fromkeys(CATEGORIES, 0.0)
    inside = [
        (max(span.start_s, start_s), min(span.end_s, end_s), priority, span.category)
        for priority, span in zip(priorities, spans, strict=True)
        if span.end_s > start_s and span.start_s < end_s
    ]
    for left_s, right_s, category in _sweep(inside, start_s, end_s):
        seconds[category or IDLE] += right_s - left_s
    return seconds


_PRODUCT_OPS = ("mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "matmul", "linear", "dot", "grouped_mm")
_PRODUCT_KERNELS = ("gemm", "cutlass", "nvjet", "xmma", "splitk", "gemv")
_STARTS = (("odc.accumulate", ACCUMULATE), ("odc.gather", GATHER), ("Optimizer.step", OPTIMIZER), ("odc::", KERNELS))
_OUR_CATEGORIES = {
    **dict.fromkeys(("scatter_kernel", "add_block_kernel"), ACCUMULATE),
    **dict.fromkeys(("gather_kernel", "gather_many_kernel"), GATHER),
    **dict.fromkeys(("set_flags_kernel", "await_flags_kernel"), BARRIERS),
}
_ATTENTION_WORDS = ("scaled_dot_product", "flash", "fmha", "varlen_attn", "_efficient_attention")


def category_of_operator(name: str) -> str | None:
    """The category of a torch operator, or a named range; None if the enclosing range decides."""
    for start, category in _STARTS:
        if name.startswith(start):
            return category
    short = name.removeprefix("aten::").removeprefix("mkldnn::")
    if name != short and short.strip("_") in _PRODUCT_OPS:
        return PRODUCTS
    return ATTENTION if any(word in name for word in _ATTENTION_WORDS) else None


def category_of_kernel(name: str, ours: frozenset[str]) -> str:
    """The category of a kernel or a copy on a GPU. `ours`: the names of this project's Triton kernels."""
    if name in ours:
        return _OUR_CATEGORIES.get(name, KERNELS)
    lower = name.lower()
    if lower.startswith("memcpy"):
        return GATHER
    for words, category in ((_ATTENTION_WORDS, ATTENTION), (_PRODUCT_KERNELS, PRODUCTS), (("adam",), OPTIMIZER)):
        if any(word in lower for word in words):
            return category
    return OTHER
