"""Folded tables follow their files, and so does the queue's chart. test_figures.py has what is committed."""

from __future__ import annotations

import copy
from importlib import import_module

import pytest

from .test_charts import A_PIXEL, drawn, results


@pytest.mark.parametrize(
    ("name", "change", "old", "new"),
    [
        ("bridge", lambda data: data["memory"]["ODC + LB-Mini"].update(shared_bytes=9e7), "205 | 81", "205 | 90"),
        ("muon", lambda data: data["ratios"]["all-to-all"].update(low=1.0), "1.28", "1.00"),
        ("layers", lambda data: data[1]["ratios"]["unsharded"].update(ratio=2.0), "1.00 |\n| ODC", "2.00 |\n| ODC"),
        ("work_queue", lambda data: data["rows"][7].update(ratio=1.5), "1.143", "1.500"),
    ],
)
def test_a_number_that_changes_changes_one_cell(name, change, old, new):
    module = import_module(f"docs.figures.{name}")
    data = copy.deepcopy(module.data())
    before = module.table(data)
    change(data)
    assert before.count(old) == 1
    assert module.table(data) == before.replace(old, new)


def test_the_queues_dots_and_bounds_are_where_their_numbers_are():
    module = import_module("docs.figures.work_queue")
    shown = [value for (value,) in drawn(module.draw(module.data()))]
    rows = results("work_queue.json")["rows"]
    assert shown == pytest.approx([it for row in rows for it in (row["ratio_best"], row["ratio"])], rel=A_PIXEL)
