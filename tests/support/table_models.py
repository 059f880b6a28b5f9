"""The table of models: what each family is expected to do."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.support import vision
from tests.support.families import FAMILIES, FUSED
from tests.support.tables import Table

COLUMNS = ("trains", "packs", "splits", "replaces layers", FUSED, "fused head", "LoRA", "simulate")
TITLES = {family.title or name: name for name, family in FAMILIES.items()}


PICTURES = ("trains", "packs", "splits", "replaces layers", "fused head", "LoRA")  # columns of families with pictures


def _expected(row: str, column: str) -> str | None:
    if row not in TITLES:
        return "yes" if column in PICTURES else None
    refusal = FAMILIES[TITLES[row]].refusal(column)
    return "yes" if refusal is None else refusal[1]


MODELS = Table(
    name="models",
    columns=COLUMNS,
    rows=(
        *((title, FAMILIES[name].kind) for title, name in TITLES.items()),
        *((family.title, family.kind) for family in vision.FAMILIES.values()),
    ),
    expected=_expected,
)


def with_pictures(name: str, columns: Sequence[str]) -> list[pytest.MarkDecorator]:
    """Marks of a test that shows these columns of a family in tests/support/vision.py, where the table has them."""
    return [MODELS.mark(vision.FAMILIES[name].title, column) for column in columns if column in PICTURES]
