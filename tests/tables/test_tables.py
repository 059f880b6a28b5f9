"""Tables of docs/tables: the committed ones are those of the tests, and only passed tests write them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.tables import Table, TableWriter
from tests.tables import TABLES

FOLDER = Path(__file__).parents[2] / "docs" / "tables"
YES, NO = ("a", "x"), ("b", "y")
REFUSED = {("b", "x"): "no: not this one", NO: "no: nor that"}
SMALL = Table(
    name="small",
    columns=("x", "y"),
    rows=(("a", "first"), ("b", "second")),
    expected=lambda row, column: None if (row, column) == ("a", "y") else REFUSED.get((row, column), "yes"),
)
CELLS = [YES, ("b", "x"), NO]


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_the_committed_table_is_that_of_the_tests(table: Table) -> None:
    committed = json.loads((FOLDER / f"{table.name}.json").read_text())
    assert set(committed.pop("versions")) == {"torch", "transformers"}
    assert committed == table.content(), "run `make tables` and commit docs/tables"


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_cells_are_yes_or_say_why_not(table: Table) -> None:
    for row in table.content()["rows"]:
        for words in row["cells"].values():
            assert words == "yes" or (words.startswith("no: ") and len(words) < 80)


def report(cell: tuple[str, str], outcome: str, when: str = "call") -> SimpleNamespace:
    return SimpleNamespace(
        user_properties=[("cell", ["small", *cell])], when=when, passed=outcome == "passed", failed=outcome == "failed"
    )


def _all_but_one() -> list[SimpleNamespace]:
    return [report(cell, "passed") for cell in CELLS[1:]]


# What happens besides the tests of all other cells that pass, and whether the table is written then.
ENDS: dict[str, tuple[Callable[[], list[SimpleNamespace]], str | None]] = {
    "passed": (lambda: [report(YES, "passed", "setup"), report(YES, "passed")], None),
    "two tests passed": (lambda: [report(YES, "passed"), report(YES, "passed")], None),
    "failed": (lambda: [report(YES, "failed")], "its test failed"),
    "one of two failed": (lambda: [report(YES, "failed"), report(YES, "passed")], "its test failed"),
    "failed in setup": (lambda: [report(YES, "failed", "setup")], "its test failed"),
    "skipped": (lambda: [report(YES, "skipped", "setup")], "no test ran"),
    "not selected": (list, "no test ran"),
}


@pytest.mark.parametrize("how", ENDS)
def test_only_passed_tests_write_a_table(how: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    reports, problem = ENDS[how]
    old = tmp_path / "small.json"
    old.write_text("the old one")
    session = SimpleNamespace(config=SimpleNamespace(), exitstatus=0)
    writer = TableWriter(tmp_path, [SMALL])
    for each in [*_all_but_one(), *reports()]:
        writer.pytest_runtest_logreport(each)
    writer.pytest_sessionfinish(session)
    if problem:
        assert session.exitstatus == 1
        assert old.read_text() == "the old one"
        assert f"small.json is left as it is, for 1 cells:\n  a, x: {problem}" in capsys.readouterr().out
        return
    assert session.exitstatus == 0
    made = json.loads(old.read_text())
    assert made["rows"] == [
        {"name": "a", "kind": "first", "cells": {"x": "yes"}},
        {"name": "b", "kind": "second", "cells": {"x": "no: not this one", "y": "no: nor that"}},
    ]
    assert made["columns"] == ["x", "y"]
    assert made["made_by"] == "make tables"
