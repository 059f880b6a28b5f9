"""What docs/_ext makes: docstrings as reStructuredText, a page per command."""

from __future__ import annotations

import argparse
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
        ("See docs/exact.md.", r"See \ :doc:`/exact`\ ."),
        ("As `fully_shard()`.", r"As \ :py:obj:`fully_shard() <odc_triton.fully_shard>`\ ."),
        ("As `pack`.", r"As \ ``pack``\ ."),  # also a parameter's name
        ("a: one\n    more\nb: other", ":Parameters:\n    * **a** \u2013 one more\n    * **b** \u2013 other"),
        (
            "Adds. a: one, b: of\none dtype.",
            "Adds.\n\n:Parameters:\n    * **a** \u2013 one\n    * **b** \u2013 of one dtype.",
        ),
        ("`a`, b: both", ":Parameters: **a**, **b** \u2013 both"),
        ("c: not a parameter", "c: not a parameter"),
        ("Is so: a, as b.", "Is so: a, as b."),
        ("Returns x.\n\nReturns y. Of z.", "Returns x.\n\n:returns: Y. Of z."),
        ("Adds. Returns y. Waits.", "Adds. Waits.\n\n:returns: Y."),
        ("Adds. Raises KeyError.\n\nReturns y.", "Adds.\n\n:returns: Y.\n:raises KeyError: "),
        (
            "Adds.\n\nRaises OSError, KeyError or RankLost for a and\nb, ValueError, naming c; TypeError if d. Waits.",
            "Adds.\n\nWaits.\n\n:raises OSError, KeyError or RankLost: for a and b.\n:raises ValueError: naming c.\n"
            ":raises TypeError: if d.",
        ),
        ("Adds. Raises as `sum`.", "Adds.\n\n:raises: as \\ ``sum``\\ ."),
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
            hidden = action.dest == "help" or action.help == argparse.SUPPRESS
            names = [] if hidden else action.option_strings
            assert all(f"{name}" in text for name in names)
            assert plain((action.help or "").split("%")[0]) in text or not names
