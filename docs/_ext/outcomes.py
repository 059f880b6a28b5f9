"""The directive `outcomes`: a table that tests made, from its JSON file. `make tables` writes the files.

A cell says "yes", "no", or either with a reason after a colon. Equal reasons share one note below the table.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

_SIGNS = {"yes": "✓", "no": "✗"}


class Outcomes(SphinxDirective):
    """`{outcomes} FILE`, relative to the page; an error if the file, a cell of it, or a word is missing."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        _, name = self.env.relfn2path(self.arguments[0])
        self.env.note_dependency(name)
        try:
            table = json.loads(Path(name).read_text(encoding="utf-8"))
            rows, notes = laid_out(table)
        except (OSError, ValueError) as error:
            raise self.error(f"{self.arguments[0]}: {error}; run: make tables") from error
        versions = ", ".join(f"{package} {version}" for package, version in table["versions"].items())
        made_by = f"Made by `{table['made_by']}`, with {versions}."
        return [
            nodes.container(
                "", *self.parse_text_to_nodes(f"{as_markdown(rows, notes)}\n\n{made_by}"), classes=["outcomes"]
            )
        ]


def laid_out(table: Mapping[str, Any]) -> tuple[list[list[str]], list[str]]:
    """Heading and rows of cells in markdown, and the reasons that the cells refer to by number.

    Raises ValueError for a missing key or cell, and for a cell that says something else.
    """
    for key in ("made_by", "versions", "columns", "rows"):
        if not table.get(key):
            raise ValueError(f"there is no {key!r} in it")
    notes: list[str] = []
    rows = [["", *table["columns"]]]
    for row in table["rows"]:
        cells = {row["name"]: "", **row["cells"]}  # nothing goes with itself
        missing = [column for column in table["columns"] if column not in cells]
        if missing:
            raise ValueError(f"row {row['name']!r} has no cell for {', '.join(map(repr, missing))}")
        first = f"**{row['name']}**" + (f"<br>{row['kind']}" if row.get("kind") else "")
        rows.append([first, *(cells[column] and _cell(cells[column], notes) for column in table["columns"])])
    return rows, notes


def _cell(text: str, notes: list[str]) -> str:
    word, _, reason = (part.strip() for part in text.partition(":"))
    if word not in _SIGNS:
        raise ValueError(f"a cell says {text!r}; it must begin with yes or no")
    note = ""
    if reason:
        if reason not in notes:
            notes.append(reason)
        note = f"<sup>{notes.index(reason) + 1}</sup>"
    said = f'<span class="heard">{word}</span>'  # by screen readers
    return f'<span class="{word}"><span aria-hidden="true">{_SIGNS[word]}</span>{said}{note}</span>'


def as_markdown(rows: list[list[str]], notes: list[str]) -> str:
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    lines.insert(1, "| --- " * len(rows[0]) + "|")
    return "\n".join([*lines, "", *(f"{number}. {note}" for number, note in enumerate(notes, 1))])


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("outcomes", Outcomes)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
