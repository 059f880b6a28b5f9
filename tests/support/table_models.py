"""The table of models: what each family is expected to do."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.support import vision
from tests.support.families import FAMILIES, FUSED, UNKNOWN
from tests.support.hybrids import HYBRIDS
from tests.support.tables import Table

COLUMNS = ("trains", "packs", "splits", "replaces layers", FUSED, "fused head", "LoRA", "simulate")
HYBRID_TITLES = {
    "Qwen3-Next": "qwen3_next",
    "Qwen3.5, text": "qwen3_5",
    "Qwen3.5-MoE, text": "qwen3_5_moe",
    "OLMo-Hybrid": "olmo_hybrid",
    "Kimi-Linear": "kimi_linear",
    "Bailing-Hybrid": "bailing_hybrid",
    "Nemotron-H": "nemotron_h",
    "Nemotron-H, experts": "nemotron_h, experts",
    "Granite 4 (GraniteMoeHybrid)": "granitemoehybrid",
    "Falcon-H1": "falcon_h1",
    "Bamba": "bamba",
    "Zamba2": "zamba2",
    "LFM2": "lfm2",
    "LFM2-MoE": "lfm2_moe",
    "LFM3": "lfm3",
}
TITLES = {family.title or name: name for name, family in FAMILIES.items()} | HYBRID_TITLES


def kind_of(name: str) -> str:
    if name in FAMILIES:
        return FAMILIES[name].kind
    return f"{'mixture' if HYBRIDS[name].mixture else 'dense'}, {HYBRIDS[name].rule}"


_NO_OUT_PROJ = ("'out_proj' is incompatible with Mamba-based", "no: PEFT refuses its `out_proj`; name other layers")


def refusal(name: str, column: str) -> tuple[str, str] | None:
    """A part of what it says, and the cell's words."""
    if name in FAMILIES:
        return FAMILIES[name].refusal(column)
    if column == "LoRA" and name.startswith(("nemotron_h", "falcon_h1")):
        return _NO_OUT_PROJ
    return UNKNOWN if column == FUSED else None


IMAGES = ("trains", "packs", "splits", "replaces layers", "fused head", "LoRA")  # columns of families with images


def _expected(row: str, column: str) -> str | None:
    if row not in TITLES:
        return "yes" if column in IMAGES else None
    refused = refusal(TITLES[row], column)
    return "yes" if refused is None else refused[1]


MODELS = Table(
    name="models",
    page="tables/models",
    columns=COLUMNS,
    rows=(
        *((title, kind_of(name)) for title, name in TITLES.items()),
        *((family.title, family.kind) for family in vision.FAMILIES.values()),
    ),
    expected=_expected,
)


def with_images(name: str, columns: Sequence[str]) -> list[pytest.MarkDecorator]:
    """Marks of a test that shows these columns of a family in tests/support/vision.py, where the table has them."""
    return [MODELS.mark(vision.FAMILIES[name].title, column) for column in columns if column in IMAGES]
