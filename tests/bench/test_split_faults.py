"""The bench of split sequences under faults: that it strikes, finds what is wrong, and says so."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from bench.suites import split_faults
from bench.suites.split_jobs import TOKENS, deal_as_planned, deal_at_random
from odc_triton.balance.pieces import SplitPlan


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--trees"]], ids=["chains", "trees"])
def test_a_short_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str]) -> None:
    monkeypatch.setattr(split_faults, "SOAK_RANKS", (3,))
    places = ["waiting in a backward", "adding"]
    out = tmp_path / "found.json"
    how = ["--kills=1", f"--soak-minutes={1 / 30}", f"--out={out}", *more]
    assert split_faults.main([*how, "--places", *places]) == 0
    found = json.loads(out.read_text())
    assert found["trees"] == bool(more)
    assert [(row["place"], row["kills"], row["wrong"]) for row in found["kills"]] == [(place, 1, 0) for place in places]
    assert all(0 < row["named_within_s"]["largest"] < 10 for row in found["kills"])
    (soak,) = found["soak"]
    assert soak["minibatches"] > 1
    assert soak["errors"] == []
    assert 0 < soak["largest_difference"] < split_faults.RELATIVE


@pytest.mark.parametrize("trees", [False, True])
def test_random_deals_can_be_computed(trees: bool) -> None:
    waves = set()
    for seed in range(200):
        deal = deal_at_random(random.Random(seed), 4, trees=trees)
        plan = SplitPlan.of(deal.packs)
        waves.add(plan.waves if plan is not None else 0)
        assert plan is None or max(plan.tokens) <= 400
    assert waves >= {1, 2, 3}


def test_planned_deals_have_trees_over_ranks() -> None:
    plans = [SplitPlan.of(deal_as_planned(random.Random(seed), 4).packs) for seed in range(20)]
    assert max(max(plan.tokens) for plan in plans if plan) <= TOKENS
    over = [plan for plan in plans if plan and any(each.piece.parent is not None for each in plan.pieces)]
    assert len(over) > 10
