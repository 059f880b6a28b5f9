"""Reads figures back out of their SVG."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from xml.etree import ElementTree

FIGURES = Path(__file__).parents[2] / "docs" / "figures"


def redrawn(name: str) -> str:
    """What the figure is now, by the library and the records."""
    figure = import_module(f"docs.figures.{name}")
    return figure.draw(figure.data())


def committed(name: str) -> str:
    return (FIGURES / f"{name}.svg").read_text(encoding="utf-8")


def found(svg: str, tag: str, *classes: str) -> list[dict]:
    """Attributes of all elements of that tag with all of `classes`; `words` of text and of what is shown as a tip."""
    elements = []
    for element in ElementTree.fromstring(svg).iter(f"{{http://www.w3.org/2000/svg}}{tag}"):
        if set(classes) <= set(element.get("class", "").split()):
            elements.append({**element.attrib, "words": "".join(element.itertext())})
    return elements


def numbers(elements: list[dict], attribute: str) -> list[float]:
    return [float(each[attribute]) for each in elements]


def words(svg: str) -> list[str]:
    return [each["words"] for each in found(svg, "text")]
