"""What docs/_ext makes: docstrings as reStructuredText, a page per command."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

EXTENSIONS = Path(__file__).parents[1] / "_ext"
sys.path.insert(0, str(EXTENSIONS))

from commands import leaves, page, plain  # noqa: E402
from docstrings import to_rst  # noqa: E402

from odc_triton.tools.cli.command import make_parser  # noqa: E402


@pytest.mark.parametrize(
    ("text", "rst"),
    [
        ("Adds `x` to *y_.", r"Adds \ ``x``\  to \*y\_."),
        ("See [Note: waves].", r"See the note on waves in \ ``odc_triton/plan/segments.py``\ ."),
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
    assert {"odc-triton train sft", "odc-triton data inspect", "odc-triton doctor"} <= pages.keys()
    for parser, text in pages.values():
        for action in parser._actions:
            names = [name for name in action.option_strings if action.dest != "help"]
            assert all(f"{name}" in text for name in names)
            assert plain((action.help or "").split("%")[0]) in text or not names
