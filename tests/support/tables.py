"""Tables of docs/tables, made from the outcomes of tests: `pytest tests/tables --write-tables FOLDER`.

A test that shows what a cell says has `Table.mark(row, column)`. It must assert what `expected` says of the cell: that
"yes" is right against plain torch, or that the library refuses what is "no: …". A table is written if every cell has a
test and all of them passed; else its old file stays, and the session fails.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

MADE_BY = "make tables"
Cell = tuple[str, str, str]  # table, row, column


@dataclass(frozen=True, kw_only=True)
class Table:
    """`rows`: names with their kinds; `expected(row, column)`: "yes" or "no: …", or None where there is no cell.
    `symmetric`: a test of (row, column) is one of (column, row) too.
    """

    name: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, str], ...]
    expected: Callable[[str, str], str | None]
    symmetric: bool = False

    def mark(self, row: str, column: str) -> pytest.MarkDecorator:
        return pytest.mark.cell(self.name, row, column)

    def cells(self, row: str) -> dict[str, str]:
        every = {column: self.expected(row, column) for column in self.columns}
        return {column: words for column, words in every.items() if words is not None}

    def content(self) -> dict[str, Any]:
        """The file's, without versions."""
        rows = [{"name": name, "kind": kind, "cells": self.cells(name)} for name, kind in self.rows]
        return {"made_by": MADE_BY, "columns": list(self.columns), "rows": rows}

    def missing(self, passed: dict[Cell, bool]) -> list[str]:
        """What keeps the table from being written."""
        found = []
        for row, _ in self.rows:
            for column in self.cells(row):
                same = [(self.name, row, column)] + [(self.name, column, row)] * self.symmetric
                outcomes = [passed[cell] for cell in same if cell in passed]
                if not all(outcomes) or not outcomes:
                    found.append(f"{row}, {column}: {'its test failed' if outcomes else 'no test ran'}")
        return found

    def write(self, folder: Path) -> None:
        versions = {name: version(name).partition("+")[0] for name in ("torch", "transformers")}
        content = {**self.content(), "versions": versions}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.name}.json").write_text(json.dumps(content, indent=1) + "\n")


class TableWriter:
    """A plugin of pytest that writes `tables` into `folder` when the session ends."""

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
            if missing := table.missing(self.passed):
                session.exitstatus = pytest.ExitCode.TESTS_FAILED
                print(f"\n{table.name}.json is left as it is, for {len(missing)} cells:", *missing, sep="\n  ")
            else:
                table.write(self.folder)
                print(f"\n{table.name}.json is in {self.folder}")
