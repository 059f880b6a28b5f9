"""Tables of the documentation: the committed ones are those of the tests, and only passed tests write them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.tables import BELOW, Table, TableWriter
from tests.tables import TABLES

DOCS = Path(__file__).parents[2] / "docs"
YES, NO = ("a", "x"), ("b", "y")
REFUSED = {("b", "x"): "no: not this one", NO: "no: nor that"}
SMALL = Table(
    name="small",
    columns=("x", "y"),
    rows=(("a", "first"), ("b", "second")),
    expected=lambda row, column: None if (row, column) == ("a", "y") else REFUSED.get((row, column), "yes"),
)
TABLE = """
|  | x | y |
| --- | :-: | :-: |
| **a**<br>first | ✓ |  |
| **b**<br>second | ✗<sup>1</sup> | ✗<sup>2</sup> |

1. not this one
2. nor that
"""
CELLS = [YES, ("b", "x"), NO]


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_the_committed_table_is_that_of_the_tests(table: Table) -> None:
    _, _, committed = (DOCS / f"{table.name}.md").read_text().partition(BELOW)
    made, _, versions = committed.rpartition("\nMade by ")
    assert made == f"\n{table.markdown()}", "run `make tables` and commit the page"
    assert re.fullmatch(r"`make tables`, with torch [\d.]+ and transformers [\d.]+\.\n", versions)


def report(cell: tuple[str, str], outcome: str) -> SimpleNamespace:
    when = "setup" if outcome == "skipped" else "call"
    passed, failed = outcome == "passed", outcome == "failed"
    return SimpleNamespace(user_properties=[("cell", ["small", *cell])], when=when, passed=passed, failed=failed)


@pytest.mark.parametrize(
    ("outcomes", "problem"),
    [(["passed"], None), (["failed", "passed"], "its test failed"), (["skipped"], "no test ran")],
)
def test_only_passed_tests_write_a_table(
    outcomes: list[str], problem: str | None, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    page = tmp_path / "small.md"
    page.write_text(f"# Small\n\n{BELOW}the old one")
    session = SimpleNamespace(config=SimpleNamespace(), exitstatus=0)
    writer = TableWriter(tmp_path, [SMALL])
    for cell, outcome in [*((cell, "passed") for cell in CELLS[1:]), *((YES, each) for each in outcomes)]:
        writer.pytest_runtest_logreport(report(cell, outcome))
    writer.pytest_sessionfinish(session)
    assert session.exitstatus == bool(problem)
    above, _, below = page.read_text().partition(BELOW)
    assert above == "# Small\n\n"
    if problem:
        assert below == "the old one"
        assert f"small.md is left as it is, for 1 cells:\n  a, x: {problem}" in capsys.readouterr().out
    else:
        assert below.startswith(TABLE)
        assert "Made by `make tables`, with torch " in below


def test_equal_reasons_share_a_note() -> None:
    same = replace(SMALL, expected=lambda row, column: "no: why" if row == "b" else "yes")
    assert same.markdown().splitlines()[3] == "| **b**<br>second | ✗<sup>1</sup> | ✗<sup>1</sup> |"
    assert same.markdown().endswith("\n\n1. why\n")
