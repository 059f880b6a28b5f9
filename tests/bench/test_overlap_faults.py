"""The bench of overlapped rollouts under faults: that it strikes, finds what is wrong, and says so."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.suites import overlap_faults
from bench.suites.overlap_jobs import Cell, Ended, Fault

CELL = Cell(ranks=2, sampling="recorded", exact=False, split=False)
KILLED = "odc-triton: rank 1 failed first: its process was killed by SIGKILL (out of memory?)\n"


@pytest.mark.slow
def test_a_short_run(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    kinds = ["kill in a message", "reward raises"]
    assert overlap_faults.main(["--faults=2", f"--out={out}", "--kinds", *kinds]) == 0
    found = json.loads(out.read_text())
    assert [(row["kind"], row["tried"], row["wrong"]) for row in found["rows"]] == [(kind, 1, 0) for kind in kinds]
    assert all(0 < row["largest_s"] < overlap_faults.WITHIN_S for row in found["rows"])
    assert all(each["difference"] < overlap_faults.RELATIVE for each in found["faults"])


def test_what_is_wrong_with_an_end() -> None:
    fault = Fault(kind="kill", cell=CELL, victim=1, step=0, moment=0.5, prompt=0)
    ended = Ended(status=1, struck_s=10.0, end_s=12.0, text="", problems=f"50%\n{KILLED}", stayed=[], cut=0)
    stop = replace(fault, kind="stop of a rank")
    assert overlap_faults._wrong(fault, ended, 0) == []
    changes = {
        "its status is None": {"status": None},
        "'odc-triton: rank 1 failed first: its process was killed by SIGKILL' is not in": {"problems": "odc-triton: ?"},
        "after it: 'and more'": {"problems": KILLED + "and more"},
        "a traceback": {"problems": f"Traceback\n{KILLED}"},
        "it ended after 20.0 s": {"end_s": 30.0},
        "process 7 stayed": {"stayed": ["process 7"]},
    }
    for words, change in changes.items():
        (wrong,) = overlap_faults._wrong(fault, replace(ended, **change), 0)
        assert wrong.startswith(words)
    stopped = replace(
        ended, status=143, problems="odc-triton: stopped by SIGTERM", text="stopped after step 2 of 4, saved in x"
    )
    assert overlap_faults._wrong(stop, stopped, 2) == []
    assert overlap_faults._wrong(stop, stopped, 1) == ["'stopped after step 2 of 4, saved in x' and 1 steps"]
