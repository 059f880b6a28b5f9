"""`python -m docs.figures [NAME ...]` redraws the figures and their tables; all of them without a name."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from pathlib import Path

HERE = Path(__file__).parent
TABLES = HERE.parent / "tables"


def names() -> list[str]:
    """The modules of this folder that are figures, or tables."""
    made = re.compile(r"^(def data\(|data = )", re.MULTILINE)
    return sorted(path.stem for path in HERE.glob("[a-z]*.py") if made.search(path.read_text(encoding="utf-8")))


def main(chosen: list[str]) -> None:
    for name in chosen or names():
        figure = import_module(f"docs.figures.{name}")
        data = figure.data()
        if hasattr(figure, "draw"):
            (HERE / f"{name}.svg").write_text(figure.draw(data), encoding="utf-8")
        if hasattr(figure, "table"):
            TABLES.mkdir(exist_ok=True)
            (TABLES / f"{name}.md").write_text(figure.table(data), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
