"""Tables of the documentation: the committed ones are those of the tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.tables import BELOW, Table
from tests.tables import TABLES

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_the_committed_table_is_that_of_the_tests(table: Table) -> None:
    _, _, committed = (DOCS / f"{table.name}.md").read_text().partition(BELOW)
    made, _, versions = committed.rpartition("\nMade by ")
    assert made == f"\n{table.markdown()}", "run `make tables` and commit the page"
    assert re.fullmatch(r"`make tables`, with torch [\d.]+ and transformers [\d.]+\.\n", versions)
