"""The predictions of docs/scale.md follow the simulator as it is."""

from __future__ import annotations

import json

import pytest

from bench.provenance import RESULTS
from bench.reports.scaling import rows


def test_a_row_made_anew_is_the_committed_one() -> None:
    (made,) = rows("7 B", 8, 2, [4])
    committed = json.loads((RESULTS / "scaling.json").read_text())["rows"]
    names = ("model", "gpus", "gpus_per_host", "samples_per_gpu", "fsdp2_way")
    (found,) = (row for row in committed if [row[n] for n in names[:4]] == [made[n] for n in names[:4]])
    assert made["fsdp2_way"] == found["fsdp2_way"]
    assert made["gb"] == pytest.approx(found["gb"], abs=1)
    for name in made.keys() - {*names, "gb", "planning_s"}:
        assert made[name] == pytest.approx(found[name], rel=0.01), name
    assert made["planning_s"] < made["step_s"]
