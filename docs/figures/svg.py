"""Draws SVG with one palette, in light and dark. An image has a style of its own; in the site it has the page's."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

WIDTH = 480  # of most figures, in SVG units: on a phone a unit is 0.73 pixels, so text is at least 13 units high

# Each colour in light and in dark. In one figure a colour has one meaning.
PALETTE = {
    "ink": ("#1c2733", "#e6e9ec"),
    "faint": ("#5b6b7b", "#9aa7b4"),
    "line": ("#cfd6dd", "#414b55"),
    "paper": ("#f4f6f8", "#1f252b"),
    "forward": ("#a9cdea", "#31668f"),
    "backward": ("#4f86b8", "#6aa5d8"),
    "wait": ("#ff6a33", "#ff7a45"),
    "step": ("#33394a", "#aab2c0"),
    "publish": ("#b9bcc4", "#6f7681"),
    "accumulate": ("#3fa79a", "#3fa79a"),
    "read": ("#8e7cc3", "#a493d8"),
    "bad": ("#b3261e", "#ff897d"),
    "rank0": ("#0072b2", "#4aa3d8"),
    "rank1": ("#e69f00", "#e6a923"),
    "rank2": ("#009e73", "#27b98f"),
    "rank3": ("#cc79a7", "#d892b8"),
}
_FONT = "font:14px system-ui,-apple-system,'Segoe UI',sans-serif"


class Drawing:
    """An SVG that grows by one element a call. Lengths are in units of its own width and height."""

    def __init__(self, title: str, *, height: float, width: float = WIDTH) -> None:
        self.title, self.width, self.height = title, width, height
        self._body: list[str] = []

    def rect(
        self, x: float, y: float, width: float, height: float, kind: str, *, tip: str = "", more: str = ""
    ) -> None:
        """A box filled with the palette's `kind`. `tip`: shown under the pointer. `more`: other classes."""
        inner = f"><title>{escape(tip)}</title></rect>" if tip else "/>"
        classes = f"{kind} {more}".strip()
        self._body.append(
            f'<rect class="{classes}" x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}"{inner}'
        )

    def text(self, x: float, y: float, text: str, kind: str = "ink", *, at: str = "start", more: str = "") -> None:
        """Text whose baseline is `y`. `at`: start, middle or end. `more`: small, strong."""
        anchor = "" if at == "start" else f' text-anchor="{at}"'
        self._body.append(
            f'<text class="{f"{kind} {more}".strip()}" x="{_n(x)}" y="{_n(y)}"{anchor}>{escape(text)}</text>'
        )

    def line(self, points: Sequence[tuple[float, float]], kind: str = "faint", *, more: str = "") -> None:
        """A line through `points`. `more`: thick, dashed, arrow (at its end)."""
        path = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
        tip = ""
        if "arrow" in more.split():
            (x0, y0), (x, y) = points[-2:]
            length = max(((x - x0) ** 2 + (y - y0) ** 2) ** 0.5, 1e-9)
            dx, dy = 7 * (x - x0) / length, 7 * (y - y0) / length
            corners = ((x, y), (x - dx - dy / 2, y - dy + dx / 2), (x - dx + dy / 2, y - dy - dx / 2))
            tip = f'<polygon class="{kind}" points="{" ".join(f"{_n(a)},{_n(b)}" for a, b in corners)}"/>'
        self._body.append(f'<polyline class="{f"{kind} {more}".strip()}" points="{path}"/>{tip}')

    def dot(self, x: float, y: float, kind: str, *, tip: str = "") -> None:
        self._body.append(
            f'<circle class="{kind}" cx="{_n(x)}" cy="{_n(y)}" r="5"><title>{escape(tip)}</title></circle>'
        )

    def legend(self, x: float, y: float, names: dict[str, str], *, step: float = 0) -> None:
        """Boxes with words, side by side: of each colour, what it means. `step`: units from one to the next."""
        for kind, words in names.items():
            self.rect(x, y - 11, 12, 12, kind, more="key")
            self.text(x + 18, y, words, "faint", more="small")
            x += step or 44 + 6.2 * len(words)

    def __str__(self) -> str:
        head = (
            f'<svg class="figure" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_n(self.width)} {_n(self.height)}" '
            f'role="img" aria-label="{escape(self.title)}">'
        )
        return "\n".join((head, f"<style>{style()}</style>", *self._body, "</svg>", ""))


def style(light: str = ".figure", dark: str = "") -> str:
    """The style of all figures. `light`, `dark`: selectors that set its colours; by default the system's scheme."""
    lines = [f"{light}{{{_colours(0)}}}"]
    lines.append(
        f"{dark}{{{_colours(1)}}}" if dark else f"@media(prefers-color-scheme:dark){{{light}{{{_colours(1)}}}}}"
    )
    lines.append(f".figure text{{{_FONT}}}.figure .small{{font-size:13px}}.figure .strong{{font-weight:600}}")
    lines += [
        f".figure .{name}{{fill:var(--{name})}}.figure polyline.{name}{{stroke:var(--{name})}}" for name in PALETTE
    ]
    lines.append(
        ".figure polyline[points]{fill:none;stroke-width:1.5}.figure polyline.thick{stroke-width:3}"
        ".figure polyline.wide{stroke-width:6}"
    )
    lines.append(".figure .dashed{stroke-dasharray:4 4}.figure .pale{opacity:.35}.figure .white{fill:#fff}")
    return "\n".join(lines)


def _colours(scheme: int) -> str:
    return ";".join(f"--{name}:{both[scheme]}" for name, both in PALETTE.items())


def _n(number: float) -> str:
    return f"{number:.2f}".rstrip("0").rstrip(".")
