"""Tables of the documentation: the committed ones are those of the tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.families import FUSED
from tests.support.tables import BELOW, Table
from tests.tables import TABLES

DOCS = Path(__file__).parents[2] / "docs"

MODELS = TABLES[0]


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_the_committed_table_is_that_of_the_tests(table: Table) -> None:
    _, _, committed = table.path(DOCS).read_text().partition(BELOW)
    made, _, versions = committed.rpartition("\nMade by ")
    assert made == f"\n{table.markdown()}", "run `make tables` and commit the page"
    assert re.fullmatch(r"`make tables`, with torch [\d.]+ and transformers [\d.]+\.\n", versions)


def test_the_page_of_models_names_each_family_and_what_it_does_not_do() -> None:
    """In its tables: of families by kind, and of what does not work; without variants of a family."""
    page = re.sub(r" \([^)]*\)", "", (DOCS / "models.md").read_text())
    known, refusing = (_names(page, heading) for heading in ("Supported families", "What does not work"))
    of = {row: re.sub(r" \(.*|, .*", "", row) for row, _ in MODELS.rows}
    assert known == {*of.values()}
    used = [column for column in MODELS.columns if column != FUSED]
    assert refusing == {
        name
        for row, name in of.items()
        if any((MODELS.expected(row, column) or "").startswith("no") for column in used)
    }


def _names(page: str, heading: str) -> set[str]:
    """What a section's table has in the column of families."""
    part = page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    column = [line.split("|")[2].strip() for line in part.splitlines() if line.startswith("|")]
    assert column[0] == "families"
    return {name for cell in column[2:] for name in cell.split(", ")}
