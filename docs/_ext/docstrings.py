"""Our docstrings are plain prose; autodoc takes reStructuredText. This turns the one into the other.

A docstring has paragraphs, lists (`- …`), code (indented further than the text) and descriptions of parameters, one
line after another: `name: text` or `name, other: text`, under `Args:` or by themselves.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from textwrap import dedent

from sphinx.application import Sphinx

_HEADINGS = {"Args:": "Parameters", "Returns:": "Returns", "Raises:": "Raises", "Yields:": "Yields"}
_MARKS = re.compile(r"`+(?P<code>.+?)`+|docs/(?P<page>\w+)\.md")


_NOTE = re.compile(r"\[Note: ([\w ,]+)\]")
_ROOT = Path(__file__).parents[2]


@cache
def notes() -> Mapping[str, str]:
    """The file of each `[Note: name]` of our code: where the name is followed by the note, at the start of a line."""
    return {
        name: path.relative_to(_ROOT).as_posix()
        for folder in ("odc_triton", "kernels")
        for path in sorted((_ROOT / folder).rglob("*.py"))
        for name in re.findall(rf"^\W*{_NOTE.pattern} [A-Z`]", path.read_text(encoding="utf-8"), re.M)
    }


def to_rst(text: str, parameters: Sequence[str] = ()) -> str:
    """The docstring `text`, whose function has these `parameters`, as reStructuredText."""
    text = _NOTE.sub(lambda note: f"the note on {note[1]} in `{notes()[note[1]]}`", text)
    blocks = re.split(r"\n\s*\n", text.expandtabs().strip("\n"))
    return "\n\n".join(_block(block.split("\n"), parameters) for block in blocks)


def _block(lines: list[str], parameters: Sequence[str]) -> str:
    heading = _HEADINGS.get(lines[0].strip())
    if heading:
        return f"**{heading}**\n\n{_block(dedent(chr(10).join(lines[1:])).split(chr(10)), parameters)}"
    if all(line.startswith("    ") for line in lines):
        return "::\n\n" + "\n".join(lines)
    texts = [""]  # what comes before the first item, then the items
    for line in lines:
        if line.startswith("- "):
            texts.append(line[2:])
        elif _describes(line, parameters):
            names, _, rest = line.partition(": ")
            texts.append(", ".join(f"`{name.strip()}`" for name in names.split(",")) + f": {rest}")
        else:
            texts[-1] += f" {line.strip()}"
    before, *items = [inline(text.strip()) for text in texts]
    return "\n\n".join(part for part in (before, "\n".join(f"* {item}" for item in items)) if part)


def _describes(line: str, parameters: Sequence[str]) -> bool:
    """Whether the line begins with names of parameters and a colon."""
    names, colon, _ = line.partition(": ")
    return bool(colon) and all(name.strip() in parameters for name in names.split(","))


def inline(text: str) -> str:
    """Text in which `code` is code, the address of a page is a link to it, and nothing else means anything."""
    out, end = "", 0
    for mark in _MARKS.finditer(text):
        shown = f":doc:`/{mark['page']}`" if mark["page"] else f"``{mark['code']}``"
        out += f"{_escape(text[end : mark.start()])}\\ {shown}\\ "  # escaped spaces end markup and don't show
        end = mark.end()
    return out + _escape(text[end:])


def _escape(text: str) -> str:
    return re.sub(r"([\\*_|`<>\[\]])", r"\\\1", text)


def process(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    # What a package's own docstring says is said on its page, for readers of the API.
    lines[:] = [] if what == "module" else to_rst("\n".join(lines), _parameters(obj)).split("\n")


def _parameters(obj: object) -> list[str]:
    try:
        return [*inspect.signature(obj).parameters]  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return []


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", process)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
