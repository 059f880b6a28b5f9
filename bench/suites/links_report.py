"""What bench.suites.links measured between GPUs, as tables and as plain data. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from odc_triton.base.report import table


@dataclass(frozen=True, kw_only=True)
class Call:
    """One operator's calls by one rank: p20, p50, p80 in microseconds, and the bytes that each moves over the link."""

    us: Mapping[str, float]
    link_bytes: int

    @property
    def gb_s(self) -> float:
        return self.link_bytes / self.us["p50"] / 1e3


@dataclass(frozen=True, kw_only=True)
class Link:
    """What `worker` did with `owner`'s memory. `nominal_gb_s`: one way, from the topology; None if unknown.

    `calls`: by operator. `failure`: why there are none.
    """

    worker: str
    owner: str
    kind: str
    nominal_gb_s: float | None = None
    calls: Mapping[str, Call] = field(default_factory=dict)
    failure: str | None = None


def operators_of(links: Sequence[Link]) -> list[str]:
    """All operators measured anywhere, in the order in which they came."""
    return list(dict.fromkeys(name for link in links for name in link.calls))


def rows_of(links: Sequence[Link]) -> list[list[object]]:
    """One row per link and operator."""
    rows: list[list[object]] = []
    for link in links:
        head = [link.worker, link.owner, link.kind, link.nominal_gb_s]
        for name, call in link.calls.items():
            share = f"{call.gb_s / link.nominal_gb_s:.0%}" if link.nominal_gb_s else None
            rows.append([*head, name, call.us["p20"], call.us["p50"], call.us["p80"], call.gb_s, share])
        if link.failure is not None:
            rows.append([*head, f"not measured: {link.failure}", *[None] * 5])
    return rows


COLUMNS = ("worker", "owner", "link", "GB/s, nominal", "operator", "p20 us", "p50 us", "p80 us", "GB/s", "of nominal")


def matrix_of(links: Sequence[Link], name: str) -> str:
    """GB/s of one operator: workers down, owners across."""
    ends = sorted({end for link in links for end in (link.worker, link.owner)}, key=lambda end: (len(end), end))
    found = {(link.worker, link.owner): link.calls[name].gb_s for link in links if name in link.calls}
    rows = [[worker, *(found.get((worker, owner)) for owner in ends)] for worker in ends]
    return table(rows, (f"{name}, GB/s", *ends))


def text_of(links: Sequence[Link]) -> str:
    """A matrix for each operator, then every figure."""
    return "\n\n".join([*(matrix_of(links, name) for name in operators_of(links)), table(rows_of(links), COLUMNS)])


def as_data(links: Sequence[Link], about: Mapping[str, Any]) -> dict[str, Any]:
    found = []
    for link in links:
        calls = {name: {**asdict(call), "gb_s": call.gb_s} for name, call in link.calls.items()}
        found.append({**asdict(link), "calls": calls})
    return {**about, "links": found}
