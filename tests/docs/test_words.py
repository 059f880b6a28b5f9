"""Pages, `--help` and messages say what the field says: none of `words.WORDS` is in them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from .words import found_in

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [*DOCS.glob("*.md"), *DOCS.glob("*/*.md"), ROOT / "README.md", ROOT / "kernels" / "README.md"]
PAGES = sorted(page for page in PAGES if page.parent.name != "commands")
CODE = sorted(path for folder in ("odc_triton", "kernels") for path in (ROOT / folder).rglob("*.py"))
_CODE = re.compile(r"^(`{3,})(?!\{).*?^\1`*$|`[^`\n]*`|\]\([^)\s]*\)|<!--.*?-->", re.MULTILINE | re.DOTALL)
_ARGUMENT = re.compile(r"^ +\w+: ", re.MULTILINE)  # of an `Args:` list
_PAPERS_NAMES = re.compile(r"\b(?:LocalSort|LB-Micro|LB-Mini)\b")


def _prose(text: str) -> str:
    """Text whose code, addresses of links and marks of numbers are gone; its lines keep their numbers."""
    return _CODE.sub(lambda code: "\n" * code[0].count("\n"), text)


def _strings(path: Path) -> Iterator[tuple[int, str]]:
    """First line and text of every string of several words: docstrings, help and messages."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value.split()) > 2:
            yield node.lineno, node.value


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_has_the_fields_words(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    found = [f"line {line}: {word!r}; write {instead}" for line, word, instead in found_in(_prose(text))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "page", [p for p in PAGES if p.parent == DOCS and p.stem != "glossary"], ids=lambda page: page.stem
)
def test_names_of_the_paper_are_links_where_a_page_first_has_them(page: Path) -> None:
    prose = re.sub(r"^\|.*$", "", _prose(page.read_text(encoding="utf-8")), flags=re.M)
    first = _PAPERS_NAMES.search(prose)
    assert first is None or re.search(rf"\[[^\]]*\b{first[0]}\b", page.read_text(encoding="utf-8")), (
        f"link {first[0]}: [{first[0]}](glossary.md#who-computes-what)"
    )


def test_help_messages_and_docstrings_have_the_fields_words() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{start + line - 1}: {word!r}; write {instead}"
        for path in CODE
        for start, text in _strings(path)
        for line, word, instead in found_in(_prose(_ARGUMENT.sub("", text)))
    ]
    assert not found, "\n".join(found)


def test_words_are_found() -> None:
    text = "A page of\npictures, besides\nimages. Work is dealt out; per-layer barriers, not layer barriers."
    assert [(line, word) for line, word, _ in found_in(text)] == [
        (2, "pictures"), (2, "besides"), (3, "dealt"), (3, "layer barriers"),
    ]  # fmt: skip
    assert _prose("a `piece` of\n```\npieces\n```\n[it](picture.md)") == "a  of\n\n\n\n[it"
