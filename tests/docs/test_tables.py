"""Tables that pages fold: the committed ones are those of the files, and so is the queue's chart."""

from __future__ import annotations

import copy
from importlib import import_module
from pathlib import Path

import pytest

from .test_charts import A_PIXEL, drawn, results

DOCS = Path(__file__).parents[2] / "docs"


def _table(name, change=None):
    module = import_module(f"docs.figures.{name}")
    data = copy.deepcopy(module.data())
    if change:
        change(data)
    return module.table(data)


@pytest.mark.parametrize(
    ("name", "change", "old", "new"),
    [
        ("muon", lambda data: data["ratios"]["all-to-all"].update(low=1.0), "1.28 to 1.42", "1.00 to 1.42"),
        ("layers", lambda data: data[1]["ratios"]["unsharded"].update(ratio=2.0), "1.00 |\n| ODC", "2.00 |\n| ODC"),
        ("work_queue", lambda data: data["rows"][7].update(ratio=1.5), "1.143 | 1.153", "1.500 | 1.153"),
    ],
)
def test_a_committed_table_is_that_of_its_file(name, change, old, new):
    committed = (DOCS / "tables" / f"{name}.md").read_text()
    assert committed == _table(name), f"run: python -m docs.figures {name}"
    assert committed.count(old) == 1
    assert _table(name, change) == committed.replace(old, new)


def test_the_queues_dots_and_bounds_are_where_their_numbers_are():
    module = import_module("docs.figures.work_queue")
    committed = (DOCS / "figures" / "work_queue.svg").read_text()
    assert committed == module.draw(module.data()), "run: python -m docs.figures work_queue"
    rows = results("work_queue.json")["rows"]
    shown = [value for (value,) in drawn(committed)]
    assert shown == pytest.approx([it for row in rows for it in (row["ratio_best"], row["ratio"])], rel=A_PIXEL)
