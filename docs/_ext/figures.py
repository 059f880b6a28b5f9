"""Puts figures and tables into the pages. In Markdown, for code hosts, they are an image and a link.

An image from docs/figures becomes inline SVG, so that it follows the page's switch from light to dark. A line that is
only a link to a page of docs/tables becomes that table, folded; the link's text is what one unfolds. Marks of numbers
(`<!--demo.json:key-->`, docs/figures/marks.py) are taken out; the page ends with their files and commits.
"""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

from sphinx.application import Sphinx

from docs.figures.marks import commits, files
from docs.figures.svg import style

BESIDE = "how_it_works"  # the page whose figures have their words beside them
_IMAGE = re.compile(r"^!\[(?P<words>[^\]]*)\]\(figures/(?P<name>\w+)\.svg\)$", re.MULTILINE)
_TABLE = re.compile(r"^\[(?P<words>[^\]]*)\]\(tables/(?P<name>\w+)\.md\)$", re.MULTILINE)
_MARK = re.compile(r"<!--.*?-->", re.DOTALL)


def inline(app: Sphinx, page: str, source: list[str]) -> None:
    folder = Path(app.srcdir)

    def figure(found: re.Match[str]) -> str:
        path = folder / "figures" / f"{found['name']}.svg"
        app.env.note_dependency(path)
        text = re.sub(r"<style>.*?</style>\n", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        text = re.sub(r'aria-label="[^"]*"', lambda _: f'aria-label="{escape(found["words"])}"', text, count=1)
        beside = " beside" if page == BESIDE else ""
        return f'<div class="figure-box{beside}">\n{text.strip()}\n</div>\n'

    def table(found: re.Match[str]) -> str:
        path = folder / "tables" / f"{found['name']}.md"
        app.env.note_dependency(path)
        words = escape(found["words"])
        return f"<details>\n<summary>{words}</summary>\n\n{path.read_text(encoding='utf-8').strip()}\n\n</details>\n"

    found = ((file, ", ".join(commits(file))) for file in files(source[0]))
    measured = ", ".join(f"{file} ({commit})" if commit else file for file, commit in found)
    source[0] = _TABLE.sub(table, _IMAGE.sub(figure, _MARK.sub("", source[0])))
    if measured:
        source[0] += (
            f"\n\n---\n\n*Files of the numbers on this page, and the commits that measured them: {measured}.*\n"
        )


def write_style(app: Sphinx) -> None:
    """The figures' colours, by furo's switch: body has data-theme light, dark or auto."""
    text = style(light="body", dark="body[data-theme=dark]")
    dark = re.search(r"^body\[data-theme=dark\](\{.*\})$", text, re.MULTILINE)
    text += f"\n@media(prefers-color-scheme:dark){{body:not([data-theme=light]){dark[1]}}}\n"
    Path(app.outdir, "_static").mkdir(parents=True, exist_ok=True)
    Path(app.outdir, "_static", "figures.css").write_text(text, encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", inline)
    app.connect("builder-inited", write_style)
    app.add_css_file("figures.css")
    return {"parallel_read_safe": True, "parallel_write_safe": True}
