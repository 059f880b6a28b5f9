"""What `record.py` recorded, as figures use it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

from odc_triton import balance
from odc_triton.base.events import BUSY_KINDS, IDLE_KINDS, Event

RECORDED = json.loads((Path(__file__).parent / "recorded.json").read_text(encoding="utf-8"))
THEIRS, OURS = "FSDP2 + global packing", "ODC + LB-Mini"


def events(minibatch: str, way: str) -> list[Event]:
    """Of both ranks, in a minibatch of `record.LENGTHS`."""
    return [Event.of_row(row) for row in RECORDED["trained"]["minibatches"][minibatch]["events"][way]]


def packs(minibatch: str, way: str) -> list[list[list[int]]]:
    """The lengths in each of a rank's microbatches, by rank, as the planner assigns them."""
    trained = RECORDED["trained"]
    of = trained["minibatches"][minibatch]
    cost = balance.CostModel.from_config(SimpleNamespace(**trained["config"]))
    how = {"balance": of["balance"][way], "token_cap": trained["token_cap"], "cost": cost}
    dealt = balance.assign(of["lengths"], ranks=2, **how)
    return [[[of["lengths"][sample] for sample in pack] for pack in own] for own in dealt]


def microbatches(found: list[Event]) -> dict[int, list[tuple[float, float]]]:
    """By rank, when each of its microbatches began and ended, from 0 s on."""
    start_s = min(event.start_s for event in found)
    spans: dict[int, dict[int, tuple[float, float]]] = {}
    for event in found:
        if event.microbatch >= 0:
            own = spans.setdefault(event.rank, {})
            begin_s, end_s = own.get(event.microbatch, (event.start_s - start_s, 0.0))
            own[event.microbatch] = min(begin_s, event.start_s - start_s), max(end_s, event.end_s - start_s)
    return {rank: [own[number] for number in sorted(own)] for rank, own in sorted(spans.items())}


def log(what: str = "") -> list[tuple[float, int, str, object]]:
    """(seconds, rank, what, value) of the run with one SIGKILL, in order; of one kind, or all."""
    return [tuple(row) for row in RECORDED["killed"]["log"] if not what or row[2] == what]


def killed_events() -> list[Event]:
    """Of the ranks in the run with one SIGKILL; of the one that was killed, those of microbatches that it ended."""
    found = []
    for at_s, rank, kind, value in log():
        if kind in BUSY_KINDS + IDLE_KINDS:
            seconds, minibatch, microbatch, label = value
            where = {"minibatch": minibatch, "microbatch": microbatch, "label": label}
            found.append(Event(rank=rank, kind=kind, start_s=at_s, end_s=at_s + seconds, **where))
    return found


def versions_read() -> dict[int, list[tuple[float, float, list[float]]]]:
    """By rank: the spans in which it read, and the versions that it found in the owners' rows, which did not change."""
    events = killed_events()
    spans: dict[int, list] = {rank: [] for rank in sorted({rank for _, rank, *_ in log()})}
    for at_s, rank, _, versions in log("read"):
        ends = [e.end_s for e in events if (e.rank, e.kind, e.minibatch) == (rank, "backward", round(versions[0]))]
        begin_s = spans[rank].pop()[0] if spans[rank] and spans[rank][-1][2] == versions else at_s
        spans[rank].append((begin_s, max(at_s, *ends), versions))
    return spans
