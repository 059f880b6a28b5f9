"""Figures and tables are drawn from what the library and recorded runs say now."""

from __future__ import annotations

import ast
import json
import re
from importlib import import_module
from pathlib import Path

import pytest

from tests.support import place  # isort: skip

from bench import quiet
from docs.figures import record_kernels, recorded
from docs.figures.__main__ import TABLES, names

FIGURES = Path(__file__).parents[2] / "docs" / "figures"


@pytest.mark.parametrize("name", names())
def test_what_is_committed_is_what_it_would_be_now(name: str) -> None:
    figure = import_module(f"docs.figures.{name}")
    data = figure.data()
    assert ast.literal_eval(repr(data)) == data, "plain data, nothing that draw() could ask"
    redraw = f"run: python -m docs.figures {name}"
    if hasattr(figure, "draw"):
        assert figure.draw(data) == (FIGURES / f"{name}.svg").read_text(encoding="utf-8"), redraw
    if hasattr(figure, "table"):
        assert figure.table(data) == (TABLES / f"{name}.md").read_text(encoding="utf-8"), redraw
    assert hasattr(figure, "draw") or hasattr(figure, "table")


def test_the_records_say_where_they_are_from() -> None:
    assert recorded.RECORDED["command"] == "python -m docs.figures.record"
    assert re.fullmatch("[0-9a-f]{40}", recorded.RECORDED["commit"]), "record again with all changes committed"
    for each in recorded.RECORDED["trained"]["minibatches"].values():
        assert each["waited_for_a_core"] < quiet.MOST_WAITING, "the machine was not quiet: record again"


@pytest.mark.skipif(not place.INTERPRETED, reason="kernels are recorded in the interpreter")
def test_kernels_do_what_was_recorded() -> None:
    committed = json.loads(record_kernels.PATH.read_text())
    assert committed | record_kernels.record() == committed, f"run {committed['command']}, then python -m docs.figures"
