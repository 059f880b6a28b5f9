"""Tables of the documentation, made from the outcomes of tests: `pytest tests/tables --write-tables docs`.

A test that shows what a cell says has `Table.mark(row, column)`. It must assert what `expected` says of the cell: that
"yes" is right against plain torch, or that the library refuses what is "no: …". A table is written below `BELOW` in
its page if every cell has a test and all of them passed; else the old one stays, and the session fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import pytest

BELOW = "<!-- `make tables` writes what is below. -->\n"
Cell = tuple[str, str, str]  # table, row, column


@dataclass(frozen=True, kw_only=True)
class Table:
    """`page`: in docs/, by default `name`. `rows`: names with their kinds; `expected(row, column)`: "yes" or "no: …",
    or None where there is no cell. `symmetric`: a test of (row, column) is one of (column, row) too.
    """

    name: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, str], ...]
    expected: Callable[[str, str], str | None]
    symmetric: bool = False
    page: str = ""

    def path(self, folder: Path) -> Path:
        return folder / f"{self.page or self.name}.md"

    def mark(self, row: str, column: str) -> pytest.MarkDecorator:
        return pytest.mark.cell(self.name, row, column)

    def markdown(self) -> str:
        """Equal reasons share one note below the table."""
        notes: list[str] = []
        lines = [["", *self.columns], ["---", *(":-:" for _ in self.columns)]]
        for name, kind in self.rows:
            cells = [_cell(self.expected(name, column), notes) for column in self.columns]
            lines.append([f"**{name}**<br>{kind}", *cells])
        table = [f"| {' | '.join(line)} |" for line in lines]
        return "\n".join([*table, "", *(f"{number}. {note}" for number, note in enumerate(notes, 1)), ""])

    def missing(self, passed: dict[Cell, bool]) -> list[str]:
        """What keeps the table from being written."""
        found = []
        for row, _ in self.rows:
            for column in self.columns:
                if self.expected(row, column) is None:
                    continue
                same = [(self.name, row, column)] + [(self.name, column, row)] * self.symmetric
                outcomes = [passed[cell] for cell in same if cell in passed]
                if not all(outcomes) or not outcomes:
                    found.append(f"{row}, {column}: {'its test failed' if outcomes else 'no test ran'}")
        return found

    def write(self, folder: Path) -> None:
        page = self.path(folder)
        above, _, _ = page.read_text().partition(BELOW)
        versions = " and ".join(f"{name} {version(name).partition('+')[0]}" for name in ("torch", "transformers"))
        page.write_text(f"{above}{BELOW}\n{self.markdown()}\nMade by `make tables`, with {versions}.\n")


def _cell(outcome: str | None, notes: list[str]) -> str:
    if outcome is None:
        return ""
    word, _, reason = outcome.partition(": ")
    sign = {"yes": "✓", "no": "✗"}[word]
    if not reason:
        return sign
    if reason not in notes:
        notes.append(reason)
    return f"{sign}<sup>{notes.index(reason) + 1}</sup>"


class TableWriter:
    """A plugin of pytest that writes `tables` into the pages in `folder` when the session ends."""

    def __init__(self, folder: Path, tables: Iterable[Table]) -> None:
        self.folder, self.tables = folder, list(tables)
        self.passed: dict[Cell, bool] = {}

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        for mark in item.iter_markers("cell"):
            item.user_properties.append(("cell", list(mark.args)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, cell in report.user_properties:
            if name == "cell" and (report.when == "call" or report.failed):
                self.passed[tuple(cell)] = self.passed.get(tuple(cell), True) and report.passed

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workerinput"):  # pytest-xdist's workers send their reports to one process
            return
        for table in self.tables:
            page = table.path(self.folder)
            if missing := table.missing(self.passed):
                session.exitstatus = pytest.ExitCode.TESTS_FAILED
                print(f"\n{page} is left as it is, for {len(missing)} cells:", *missing, sep="\n  ")
            else:
                table.write(self.folder)
                print(f"\n{page} has its new table")
