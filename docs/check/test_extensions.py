"""What docs/_ext makes: docstrings as reStructuredText, a page per command, tables of outcomes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXTENSIONS = Path(__file__).parents[1] / "_ext"
sys.path.insert(0, str(EXTENSIONS))

from commands import leaves, page, plain  # noqa: E402
from docstrings import to_rst  # noqa: E402
from outcomes import laid_out  # noqa: E402

from odc_triton.cli.command import make_parser  # noqa: E402

TABLE = {
    "made_by": "make tables",
    "versions": {"torch": "2"},
    "columns": ["packs", "splits"],
    "rows": [
        {"name": "A", "kind": "dense", "cells": {"packs": "yes", "splits": "no: why"}},
        {"name": "B", "cells": {"packs": "yes: with care", "splits": "no: why"}},
    ],
}


@pytest.mark.parametrize(
    ("text", "rst"),
    [
        ("Adds `x` to *y_.", r"Adds \ ``x``\  to \*y\_."),
        ("See docs/exact.md.", r"See \ :doc:`/exact`\ ."),
        ("a: one\n    more\nb: other", "* \\ ``a``\\ : one more\n* \\ ``b``\\ : other"),
        ("a, b: both", "* \\ ``a``\\ , \\ ``b``\\ : both"),
        ("c: not a parameter", "c: not a parameter"),
        ("`a`: a sentence", "\\ ``a``\\ : a sentence"),
        ("Args:\n    a: one\n    and more", "**Parameters**\n\n* \\ ``a``\\ : one and more"),
        ("Text.\n\n    code_(x)", "Text.\n\n::\n\n    code_(x)"),
        ("Some:\n- one\n- two", "Some:\n\n* one\n* two"),
    ],
)
def test_docstrings(text: str, rst: str) -> None:
    assert to_rst(text, ["a", "b"]) == rst


def test_every_command_and_option_is_described() -> None:
    pages = {parser.prog: (parser, page(parser, line)) for parser, line in leaves(make_parser())}
    assert {"odc-triton train sft", "odc-triton data inspect", "odc-triton topo"} <= pages.keys()
    for parser, text in pages.values():
        for action in parser._actions:
            names = [name for name in action.option_strings if action.dest != "help"]
            assert all(f"{name}" in text for name in names)
            assert plain((action.help or "").split("%")[0]) in text or not names


def test_outcomes_share_their_notes() -> None:
    rows, notes = laid_out(TABLE)
    assert rows[0] == ["", "packs", "splits"]
    assert notes == ["why", "with care"]
    assert [row[0] for row in rows[1:]] == ["**A**<br>dense", "**B**"]
    assert [cell.count("<sup>") for row in rows[1:] for cell in row[1:]] == [0, 1, 1, 1]
    assert rows[1][2] == rows[2][2] != rows[2][1]


def test_nothing_need_go_with_itself() -> None:
    rows = [{"name": "packs", "cells": {"splits": "yes"}}, {"name": "splits", "cells": {"packs": "yes"}}]
    rows, _ = laid_out(TABLE | {"rows": rows})
    assert [[bool(cell) for cell in row] for row in rows[1:]] == [[True, False, True], [True, True, False]]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"versions": {}}, "no 'versions'"),
        ({"columns": ["packs", "splits", "more"]}, "row 'A' has no cell for 'more'"),
        ({"rows": [{"name": "C", "cells": {"packs": "maybe", "splits": "yes"}}]}, "'maybe'"),
    ],
)
def test_outcomes_that_are_wrong(changes: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        laid_out(TABLE | changes)


@pytest.mark.parametrize("there", [True, False])
def test_a_missing_table_stops_the_build(there: bool, tmp_path: Path) -> None:
    extensions = ["myst_parser", "outcomes"]
    (tmp_path / "conf.py").write_text(
        f"import sys\nsys.path.insert(0, {str(EXTENSIONS)!r})\nextensions = {extensions}\n"
    )
    (tmp_path / "index.md").write_text("# Page\n\n```{outcomes} table.json\n```\n")
    if there:
        (tmp_path / "table.json").write_text(json.dumps(TABLE))
    command = [sys.executable, "-m", "sphinx", "-n", "-W", "-q", str(tmp_path), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode == 0) is there, done.stderr
    if there:
        assert "1. why" not in (tmp_path / "out" / "index.html").read_text()  # a list, not its source
    else:
        assert "run: make tables" in done.stderr
