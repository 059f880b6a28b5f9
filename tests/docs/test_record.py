"""The recorder of the figures' run with a SIGKILL still records what they show."""

from __future__ import annotations

import pytest


@pytest.mark.slow
def test_a_run_with_a_sigkill_is_recorded() -> None:
    from docs.figures import record

    run = record.killed()
    by_kind: dict[str, list] = {}
    for at_s, rank, what, value in run["log"]:
        by_kind.setdefault(what, []).append((at_s, rank, value))
    ((killed_s, victim, _),) = by_kind["killed"]
    assert victim == record.VICTIM
    assert f"rank {victim} failed first: its process was killed by SIGKILL" in run["launcher"]
    assert max(at_s for at_s, rank, _ in by_kind["read"] if rank == victim) < killed_s
    assert all(len(set(versions)) == 1 for _, _, versions in by_kind["read"])
    assert {versions[0] for _, _, versions in by_kind["read"]} == set(range(record.LAST - 2, record.LAST + 1))
    assert {"stepping", "published", "reached", "forward", "backward"} <= set(by_kind)
    # On a slow machine the launcher ends the others before they have seen it.
    assert all(f"rank {victim} died" in text for _, _, text in by_kind.get("error", []))
