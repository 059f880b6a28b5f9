"""The report of a run: timelines as an image, numbers as a table, both with the loss curves as one page.

Timelines are painted by pixel, not by span: a pixel column is an interval of time, and a rank's bar shows the share of
each state in it, waiting at the top. So spans thinner than a column keep their area, however many there are.

matplotlib (extra `plot`) is imported only when something is drawn, and its global state stays unchanged.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...base.events import Event
from ...base.files import write_file
from . import trace
from .trace import UNRECORDED, Interval, Tracks, barriers, headline, longest_s, segments, shares, whole, window_s

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# From the top of a bar to its bottom. Work is blue, green or dark, waiting vermilion: distinct in the common kinds of
# colour blindness, and in lightness too.
COLOURS = {
    "wait": ("#FF4E0A", "waiting"),
    UNRECORDED: ("#F9BFA6", "nothing recorded (idle too)"),
    "step": ("#2B2B33", "optimizer step"),
    "publish": ("#C6C6CA", "publishing parameters"),
    "backward": ("#4F86B8", "backward"),
    "forward": ("#B5D3EA", "forward"),
    "scoring": ("#8E7CC3", "rewards"),
    "rollout": ("#D9D2E9", "sampling completions"),
}
INK, FAINT = "#1A1A1A", "#6B6B6B"
# Okabe and Ito's colours without black and yellow.
CURVES = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9")
TITLE = "What every rank does over time: red is waiting"

# Images have twice as many pixels as they are shown with. Ranks' names and numbers are next to the axes.
_DPI, _WIDTH, _LEFT, _COLUMNS = 200, 2400, 150, 1830
_ABOVE, _BELOW, _BETWEEN = 242, 140, 110


def timeline_figure(tracks: Tracks, *, title: str = TITLE) -> Figure:
    """All tracks over one axis of seconds, each from its own zero, 1200 logical pixels wide.

    Variants are stacked, ranks are rows; a row's upper quarter is what another process does for the rank, if any does.
    A mark under the rows is a barrier of all ranks (`trace.barriers`), a line through the rows is a barrier of a whole
    minibatch. Show a few minibatches (`trace.excerpt`): over very many, a bar shows local shares, not single waits.

    Raises ValueError without tracks or events, ImportError without matplotlib.
    """
    axis_s = longest_s(tracks)
    ranks = {name: segments(events) for name, events in tracks.items()}
    # 5 variants of 2 ranks and of 64 both fit a page or two.
    bar = min(52, max(6, 1600 // sum(map(len, ranks.values()))))
    total = _ABOVE + sum(len(rows) * bar + _BETWEEN for rows in ranks.values()) - _BETWEEN + _BELOW
    figure, top = _figure(total), _ABOVE
    for name, events in tracks.items():
        axes = _axes(figure, total, top, len(ranks[name]) * bar)
        _draw_track(axes, events, ranks[name], axis_s, bar)
        axes.set_title(name, loc="left", fontsize=10.5, weight="bold", color=INK, parse_math=False)
        top += len(ranks[name]) * bar + _BETWEEN
    for each in figure.axes[:-1]:
        each.tick_params(labelbottom=False)
    start = "its start" if len(tracks) == 1 else "each variant's own start"
    figure.axes[-1].set_xlabel(f"seconds from {start}", fontsize=9, color=FAINT)
    style = {"fontsize": 14, "fontweight": "bold", "color": INK, "va": "center", "parse_math": False}
    figure.text(30 / _WIDTH, 1 - 50 / total, title, **style)
    states = {segment.state for rows in ranks.values() for flat in rows.values() for segment in flat}
    _legend(figure, [state for state in COLOURS if state in states], y=1 - 84 / total)
    return figure


def _draw_track(
    axes: Axes, events: Sequence[Event], rows: Mapping[int, list[Interval]], axis_s: float, bar: int
) -> None:
    """One variant's ranks, `bar` pixels each, from its first start on."""
    start_s = window_s(events)[0]
    edges_s = start_s + np.linspace(0.0, axis_s, _COLUMNS + 1)
    pixels = np.full((len(rows) * bar, _COLUMNS, 3), 255, dtype=np.uint8)
    for row, (rank, flat) in enumerate(rows.items()):
        own = pixels[row * bar : (row + 1) * bar - (4 if bar > 12 else 0)]
        _paint(own, shares(flat, edges_s))
        for event in events:
            if event.is_elsewhere and event.rank == rank:  # above what the rank does meanwhile
                first, end = np.searchsorted(edges_s, (event.start_s, event.end_s))
                own[: len(own) // 4, first:end] = _rgb(COLOURS[event.kind][0])
    axes.imshow(pixels, extent=(0, axis_s, len(rows), 0), aspect="auto", interpolation="nearest")
    found = barriers(events)
    axes.plot([each.at_s - start_s for each in found], [len(rows)] * len(found), "|", color=INK, clip_on=False)
    axes.vlines([each.at_s - start_s for each in found if each.microbatch < 0], 0, len(rows), colors=INK, linewidth=1)
    named = [row for row in range(len(rows)) if len(rows) <= 8 or row in (0, len(rows) - 1)]
    axes.set_yticks([row + 0.5 for row in named], [f"rank {[*rows][row]}" for row in named])
    axes.tick_params(colors=FAINT, labelsize=9, left=False)
    axes.spines[["left", "top", "right"]].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.text(1.012, 0.5, "\n".join(headline(events)), transform=axes.transAxes, va="center", fontsize=10, color=INK)


def save_timeline(tracks: Tracks, path: str | Path, *, title: str = TITLE) -> None:
    """Writes `timeline_figure` as a PNG, 2400 pixels wide. Errors as there and in `write_file`."""
    write_file(path, _png(timeline_figure(tracks, title=title)))


def save_timelines(tracks: Tracks, folder: Path, *, title: str = TITLE) -> None:
    """Prints the timelines, and writes trace.json and, with matplotlib, timeline.png into `folder`."""
    trace.save_trace(tracks, folder / "trace.json")
    if can_draw():
        save_timeline(tracks, folder / "timeline.png", title=title)
    else:
        print('timeline.png was not drawn: it needs matplotlib; run: pip install "odc-triton[plot]"')
    print(trace.timeline_text(tracks, width=80))


def can_draw() -> bool:
    """True if matplotlib can be imported."""
    try:
        require_matplotlib()
    except ImportError:
        return False
    return True


def require_matplotlib() -> Any:
    """The matplotlib package, with the submodules that drawing needs. Raises ImportError with the remedy."""
    try:
        import matplotlib.figure
        import matplotlib.lines
        import matplotlib.patches
    except ImportError as error:
        raise ImportError('drawing needs matplotlib; run: pip install "odc-triton[plot]"') from error
    return matplotlib


def _figure(total: int) -> Figure:
    """An empty image, `total` pixels high."""
    size = (_WIDTH / _DPI, total / _DPI)
    return require_matplotlib().figure.Figure(figsize=size, dpi=_DPI, facecolor="white")


def _axes(figure: Figure, total: int, top: int, height: int) -> Axes:
    return figure.add_axes((_LEFT / _WIDTH, 1 - (top + height) / total, _COLUMNS / _WIDTH, height / total))


def _paint(bar: np.ndarray, part: Mapping[str, np.ndarray]) -> None:
    """Fills `bar` (rows, columns, 3): a column's states stacked, each as high as its share."""
    heights = np.cumsum([part[state] for state in COLOURS], axis=0) * len(bar)
    heights = np.maximum.accumulate([whole(height) for height in heights], axis=0)
    row = np.arange(len(bar))[:, None]
    for state, height in reversed(list(zip(COLOURS, heights, strict=True))):
        bar[row < height] = _rgb(COLOURS[state][0])


def _rgb(colour: str) -> tuple[int, ...]:
    return tuple(bytes.fromhex(colour[1:]))


def _legend(figure: Figure, states: list[str], *, y: float) -> None:
    """The legend of the drawn states, in the order of the work, in one or two rows under the title."""
    matplotlib = require_matplotlib()
    keys = [matplotlib.patches.Patch(color=COLOURS[s][0], label=COLOURS[s][1]) for s in reversed(states)]
    mark = {"color": INK, "marker": "|", "linestyle": "", "markersize": 10}
    keys.append(matplotlib.lines.Line2D([], [], label="barrier", **mark))
    place = {"loc": "upper left", "bbox_to_anchor": (12 / _WIDTH, y), "ncols": min(len(keys), 5)}
    style = {"frameon": False, "fontsize": 9, "labelcolor": INK, "handlelength": 1.3, "columnspacing": 1.4}
    figure.legend(handles=keys, handletextpad=0.6, **place, **style)


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI)
    return buffer.getvalue()


@dataclass(frozen=True, kw_only=True)
class Curves:
    """One image of values over steps, under its title. `values`: by curve, one value per step; NaN leaves a gap."""

    title: str
    label: str = ""  # of the values' axis, where the title does not say it
    first: int = 1  # step
    values: Mapping[str, Sequence[float]]


def curve_figure(curves: Curves) -> Figure:
    """All curves on one pair of axes; earlier curves are wider, so that equal ones all show."""
    figure = _figure(total=700)
    axes = _axes(figure, 700, top=30, height=560)
    for index, (name, values) in enumerate(curves.values.items()):
        width = 1.2 + 1.3 * (len(curves.values) - 1 - index)
        label = f"\u200b{name}"  # matplotlib hides labels that begin with an underscore
        alone = "o" if np.isnan(values).any() else None  # a value between gaps has no line
        style = {"color": CURVES[index % len(CURVES)], "lw": width, "marker": alone, "markersize": 5}
        axes.plot(range(curves.first, curves.first + len(values)), values, label=label, **style)
    axes.set_xlabel("step", color=FAINT)
    plain = [axes.set_ylabel(curves.label, color=FAINT)]
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.get_major_locator().set_params(integer=True)
    place = {"loc": "upper left", "bbox_to_anchor": (1, 1), "handlelength": 1, "handletextpad": 0.5}
    if len(curves.values) > 1:
        plain += axes.legend(frameon=False, fontsize=8.5, labelcolor=INK, **place).get_texts()
    for text in plain:
        text.set_parse_math(False)
    return figure


def in_columns(rows: Sequence[Sequence[str]], *, numbers: bool = False) -> list[str]:
    """Rows of cells as lines of aligned columns. `numbers`: right-align all columns but the first."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [str.ljust, *[str.rjust if numbers else str.ljust] * (len(widths) - 1)]
    return ["  ".join(side(cell, n) for side, cell, n in zip(sides, row, widths, strict=True)).rstrip() for row in rows]


def table(rows: Sequence[Sequence[object]], columns: Sequence[str]) -> str:
    """An aligned Markdown table: numbers right-aligned, floats with four digits, None as a dash.

    `rows`: one sequence of cells per row.
    """
    texts, numeric = _cells(rows, columns)
    texts = [[cell.replace("\\", "\\\\").replace("|", "\\|") for cell in row] for row in texts]
    widths = [max(3, *map(len, column)) for column in zip(*texts, strict=True)]
    rule = ["-" * (width - 1) + (":" if right else "-") for width, right in zip(widths, numeric, strict=True)]
    lines = []
    for row in (texts[0], rule, *texts[1:]):
        cells = zip(row, widths, numeric, strict=True)
        lines.append("| " + " | ".join(c.rjust(w) if right else c.ljust(w) for c, w, right in cells) + " |")
    return "\n".join(lines)


def _cells(rows: Sequence[Sequence[object]], columns: Sequence[str]) -> tuple[list[list[str]], list[bool]]:
    """The table as one-line texts, heading first, and which columns hold numbers ("12 ms" is one)."""
    texts = [[_text(cell) for cell in row] for row in (columns, *rows)]
    number = re.compile(r"(–|nan|[-+−±<>≤≥~]?\s?(\d|inf))")
    numeric = [bool(rows) and all(map(number.match, column[1:])) for column in zip(*texts, strict=True)]
    return texts, numeric


def _text(cell: object) -> str:
    if cell is None:
        return "–"
    if isinstance(cell, float):
        return f"{cell:,.0f}" if 1e4 <= abs(cell) < 1e15 else f"{cell:.4g}"
    if isinstance(cell, int) and not isinstance(cell, bool):
        return f"{cell:,}"
    return " ".join(str(cell).split())


_STYLE = """
body { max-width: 1200px; margin: 2rem auto; padding: 0 1rem; font: 16px/1.5 system-ui, sans-serif; }
img { width: 100%; height: auto; }
table { border-collapse: collapse; display: block; overflow-x: auto; }
th, td { padding: .35rem .8rem; text-align: left; border-bottom: 1px solid #d5d5d5; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
dl { display: grid; grid-template-columns: fit-content(40%) 1fr; gap: .2rem 1rem; }
dt { overflow-wrap: anywhere; }
dd { margin: 0; overflow-wrap: anywhere; grid-column: 2; }
summary { cursor: pointer; }
"""


def save_html(path: str | Path, *, title: str, parts: Sequence[str]) -> None:
    """Writes one self-contained page of `parts`, in order, of which empty ones are left out; nothing is loaded.

    Parts are HTML by the functions below, which escape all text. Errors as in `write_file`.
    """
    page = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
{chr(10).join(filter(None, parts))}
</body>
</html>
"""
    write_file(path, page.encode())


def text_part(text: str) -> str:
    """`text`, with an empty line between paragraphs."""
    paragraphs = (" ".join(part.split()) for part in text.split("\n\n"))
    return "\n".join(f"<p>{escape(part)}</p>" for part in paragraphs if part)


def table_part(rows: Sequence[Sequence[object]], columns: Sequence[str], *, heading: str = "") -> str:
    """`rows` and `columns` as for `table`, with its errors."""
    return _headed(heading, _html_table(*_cells(rows, columns))) if rows else ""


def timelines_part(tracks: Tracks) -> str:
    """`tracks` as for `timeline_figure`, with its errors."""
    return _headed("Timelines", _html_image(timeline_figure(tracks), _in_words(tracks))) if tracks else ""


def curves_part(curves: Curves) -> str:
    known = {name: [value for value in values if value == value] for name, values in curves.values.items()}
    last = "; ".join(f"{name} ends at {values[-1]:.4g}" for name, values in known.items() if values)
    return _headed(curves.title, _html_image(curve_figure(curves), f"{curves.title}. {last}"))


def facts_part(heading: str, facts: Mapping[str, str], *, folded: bool = False) -> str:
    """Names and values; of a value each line, in which `code` may be. `folded`: shown on a click."""
    lines = {
        name: "".join(f"<dd>{_html_code(line)}</dd>" for line in value.split("\n")) for name, value in facts.items()
    }
    pairs = f"<dl>{''.join(f'<dt>{escape(name)}</dt>{line}' for name, line in lines.items())}</dl>"
    if folded:
        return f"<details><summary>{escape(heading)}</summary>\n{pairs}</details>" if facts else ""
    return _headed(heading, pairs) if facts else ""


def _headed(heading: str, html: str) -> str:
    return f"<h2>{escape(heading)}</h2>\n{html}" if heading else html


def _html_code(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def _in_words(tracks: Tracks) -> str:
    return "Timelines. " + "; ".join(f"{name}: {', '.join(headline(events))}" for name, events in tracks.items())


def _html_image(figure: Figure, words: str) -> str:
    data = base64.b64encode(_png(figure)).decode()
    return f'<img alt="{escape(words)}" src="data:image/png;base64,{data}">'


def _html_table(rows: Sequence[Sequence[str]], numeric: Sequence[bool]) -> str:
    """`rows`: the heading first. `numeric`: which columns hold numbers."""
    marks = [' class="number"' if right else "" for right in numeric]

    def line(row: Sequence[str], tag: str) -> str:
        cells = (f"<{tag}{mark}>{escape(cell)}</{tag}>" for mark, cell in zip(marks, row, strict=True))
        return f"<tr>{''.join(cells)}</tr>"

    head, *body = rows
    lines = "\n".join(line(row, "td") for row in body)
    return f"<table>\n<thead>{line(head, 'th')}</thead>\n<tbody>{lines}</tbody>\n</table>"
