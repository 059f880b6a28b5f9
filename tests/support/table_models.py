"""The table of models: what each family is expected to do."""

from __future__ import annotations

from tests.support.families import FAMILIES, FUSED
from tests.support.tables import Table

COLUMNS = ("trains", "packs", "splits", "replaces layers", FUSED, "fused head", "LoRA", "simulate")
TITLES = {family.title or name: name for name, family in FAMILIES.items()}


def _expected(row: str, column: str) -> str:
    refusal = FAMILIES[TITLES[row]].refusal(column)
    return "yes" if refusal is None else refusal[1]


MODELS = Table(
    name="models",
    columns=COLUMNS,
    rows=tuple((title, FAMILIES[name].kind) for title, name in TITLES.items()),
    expected=_expected,
)
