"""The report of a run: timelines as a picture, numbers as a table, both with the loss curves as one page.

Timelines are painted by pixel, not by span: a pixel column is a stretch of time, and a rank's bar shows how that
stretch was spent, waiting at the top. So spans thinner than a column keep their area, however many there are.

matplotlib (extra `plot`) is imported only when something is drawn, and its global state is left alone.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .trace import UNRECORDED, Tracks, headline, longest_s, meetings, segments, shares, whole, window_s, write_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# From the top of a bar to its bottom. Work is blue, green or dark, waiting vermilion: hues that remain distinct in
# the common kinds of colour blindness, and that differ in lightness too.
COLOURS = {
    "wait": ("#FF4E0A", "waiting"),
    UNRECORDED: ("#F9BFA6", "nothing recorded (idle too)"),
    "step": ("#2B2B33", "optimizer step"),
    "publish": ("#C6C6CA", "publishing parameters"),
    "accumulate": ("#3FA79A", "adding gradients to their owners"),
    "backward": ("#4F86B8", "backward"),
    "forward": ("#B5D3EA", "forward"),
    "scoring": ("#8E7CC3", "rewards"),
    "rollout": ("#D9D2E9", "sampling completions"),
}
INK, FAINT, ALARM = "#1A1A1A", "#6B6B6B", "#C23000"
# Okabe and Ito's colours without black and yellow.
CURVES = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9")
TITLE = "What every rank does over time: red is waiting"

# The picture has twice as many pixels as it is shown with.
_DPI, _WIDTH = 200, 2400
_LEFT, _RIGHT, _TOP, _BOTTOM = 150, 420, 190, 110
_HEADING, _RAIL, _BETWEEN = 52, 16, 34


def timeline_figure(tracks: Tracks, *, title: str = TITLE) -> Figure:
    """All tracks on one axis of seconds, each from its own zero, 1200 logical pixels wide.

    Variants are stacked, ranks are rows. A mark under the rows is a meeting of all ranks (`trace.meetings`),
    a line through the rows is one that belongs to the whole minibatch. Total time, idle share
    (`trace.idle_fraction`) and meetings per minibatch are on the right. Show a few minibatches
    (`trace.excerpt`): over very many, a bar shows local shares, not single waits.

    Raises ValueError without tracks or events, ImportError without matplotlib.
    """
    axis_s = longest_s(tracks)
    ranks = {name: segments(events) for name, events in tracks.items()}
    # 5 variants of 2 ranks and of 64 both fit a page or two.
    bar = min(52, max(6, 1600 // sum(map(len, ranks.values()))))
    pitch = bar + (4 if bar > 12 else 0)
    columns = _WIDTH - _LEFT - _RIGHT
    height = sum(_HEADING + len(rows) * pitch + _RAIL + _BETWEEN for rows in ranks.values())
    figure, axes = _canvas(_TOP + height + _BOTTOM, height)
    pixels = np.full((height, columns, 3), 255, dtype=np.uint8)
    seen = set()
    top = _HEADING
    for name, events in tracks.items():
        edges_s = window_s(events)[0] + np.linspace(0.0, axis_s, columns + 1)
        bottom = top + len(ranks[name]) * pitch
        _write(axes, 0, top - 22, name, size=10.5, weight="bold")
        for row, (rank, flat) in enumerate(ranks[name].items()):
            part = shares(flat, edges_s)
            seen.update(state for state, share in part.items() if share.any())
            y = top + row * pitch
            _paint(pixels[y : y + bar], part)
            if len(ranks[name]) <= 8 or row in (0, len(ranks[name]) - 1):
                _write(axes, -14, y + bar / 2, f"rank {rank}", colour=FAINT, align="right")
        for meeting in meetings(events):
            x = min(int((meeting.at_s - edges_s[0]) / axis_s * columns), columns - 2)
            line_top = bottom if meeting.microbatch >= 0 else top - 6
            pixels[line_top : bottom + _RAIL, x : x + 2] = _rgb(INK)
        total, idle, met = headline(events)
        middle = (top + bottom) / 2
        _write(axes, columns + 24, middle - 34, total, size=12, weight="bold")
        _write(axes, columns + 24, middle + 4, idle, size=10.5, colour=ALARM)
        _write(axes, columns + 24, middle + 38, met, colour=FAINT)
        top = bottom + _RAIL + _BETWEEN + _HEADING
    axes.imshow(pixels, extent=(0, columns, height, 0), aspect="auto", interpolation="nearest")
    _time_axis(axes, axis_s / columns, "its start" if len(tracks) == 1 else "each variant's own start")
    _write(axes, 30 - _LEFT, 50 - _TOP, title, size=14, weight="bold")
    _legend(figure, [state for state in COLOURS if state in seen], y=1 - 84 / (_TOP + height + _BOTTOM))
    return figure


def save_timeline(tracks: Tracks, path: str | Path, *, title: str = TITLE) -> None:
    """Writes `timeline_figure` as a PNG, 2400 pixels wide. Errors as there and in `write_file`."""
    write_file(path, _png(timeline_figure(tracks, title=title)))


def can_draw() -> bool:
    """Whether matplotlib can be imported."""
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
        import matplotlib.ticker
    except ImportError as error:
        raise ImportError('drawing needs matplotlib; run: pip install "odc-triton[plot]"') from error
    return matplotlib


def _canvas(total: int, height: int) -> tuple[Figure, Axes]:
    """A figure `total` pixels high, and in it, under the title, axes whose units are pixels, y downwards."""
    figure = require_matplotlib().figure.Figure(figsize=(_WIDTH / _DPI, total / _DPI), dpi=_DPI, facecolor="white")
    columns = _WIDTH - _LEFT - _RIGHT
    axes = figure.add_axes((_LEFT / _WIDTH, _BOTTOM / total, columns / _WIDTH, height / total))
    return figure, axes


def _write(
    axes: Axes,
    x: float,
    y: float,
    text: str,
    *,
    size: float = 9,
    weight: str = "normal",
    colour: str = INK,
    align: str = "left",
) -> None:
    # A `$` in a variant's name is a dollar sign, not a formula.
    style = {"fontsize": size, "fontweight": weight, "color": colour, "ha": align, "va": "center"}
    axes.text(x, y, text, clip_on=False, parse_math=False, **style)


def _paint(bar: np.ndarray, part: Mapping[str, np.ndarray]) -> None:
    """Fills `bar` (rows, columns, 3): a column's states on top of each other, each as high as its share."""
    heights = np.cumsum([part[state] for state in COLOURS], axis=0) * len(bar)
    heights = np.maximum.accumulate([whole(height) for height in heights], axis=0)
    row = np.arange(len(bar))[:, None]
    for state, height in reversed(list(zip(COLOURS, heights, strict=True))):
        bar[row < height] = _rgb(COLOURS[state][0])


def _rgb(colour: str) -> tuple[int, ...]:
    return tuple(bytes.fromhex(colour[1:]))


def _time_axis(axes: Axes, seconds_per_pixel: float, start: str) -> None:
    columns, height = axes.get_xlim()[1], axes.get_ylim()[0]
    locator = require_matplotlib().ticker.MaxNLocator(nbins=9, steps=(1, 2, 5, 10))
    end_s = columns * seconds_per_pixel
    ticks_s = [tick_s for tick_s in locator.tick_values(0, end_s) if 0 <= tick_s <= end_s]
    axes.set_xticks([tick_s / seconds_per_pixel for tick_s in ticks_s], [f"{tick_s:.6g}" for tick_s in ticks_s])
    axes.set_yticks([])
    axes.tick_params(colors=FAINT, labelsize=9)
    _write(axes, columns / 2, height + 82, f"seconds from {start}", colour=FAINT, align="center")
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(FAINT)


def _legend(figure: Figure, states: list[str], *, y: float) -> None:
    """Names of the states drawn, in the order of the work, in one or two rows under the title."""
    matplotlib = require_matplotlib()
    keys = [matplotlib.patches.Patch(color=COLOURS[s][0], label=COLOURS[s][1]) for s in reversed(states)]
    mark = {"color": INK, "marker": "|", "linestyle": "", "markersize": 10}
    keys.append(matplotlib.lines.Line2D([], [], label="all ranks meet", **mark))
    figure.legend(
        handles=keys,
        loc="upper left",
        bbox_to_anchor=(12 / _WIDTH, y),
        ncols=min(len(keys), 5),
        frameon=False,
        fontsize=9,
        labelcolor=INK,
        handlelength=1.3,
        columnspacing=1.4,
        handletextpad=0.6,
    )


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI)
    return buffer.getvalue()


@dataclass(frozen=True, kw_only=True)
class Curves:
    """One picture of values over minibatches. `values`: by curve, one value per minibatch; NaN leaves a gap."""

    title: str
    label: str  # of the values' axis
    values: Mapping[str, Sequence[float]]


@dataclass(frozen=True, kw_only=True)
class Texts:
    """A table whose cells are texts of any length, with their line breaks; None is an empty cell."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]


def curve_figure(curves: Curves) -> Figure:
    """All curves on one pair of axes; earlier curves are wider, so that equal ones all show."""
    figure, axes = _canvas(total=760, height=560)
    for index, (name, values) in enumerate(curves.values.items()):
        width = 1.2 + 1.3 * (len(curves.values) - 1 - index)
        label = f"\u200b{name}"  # matplotlib hides labels that begin with an underscore
        alone = "o" if np.isnan(values).any() else None  # a value between gaps has no line
        style = {"color": CURVES[index % len(CURVES)], "lw": width, "marker": alone, "markersize": 5}
        axes.plot(range(1, len(values) + 1), values, label=label, **style)
    axes.set_xlabel("minibatch", color=FAINT)
    plain = [
        axes.set_title(curves.title, loc="left", color=INK, fontsize=12, weight="bold"),
        axes.set_ylabel(curves.label, color=FAINT),
    ]
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.get_major_locator().set_params(integer=True)
    place = {"loc": "upper left", "bbox_to_anchor": (1, 1), "handlelength": 1, "handletextpad": 0.5}
    names = axes.legend(frameon=False, fontsize=8.5, labelcolor=INK, **place)
    for text in (*plain, *names.get_texts()):
        text.set_parse_math(False)
    return figure


def installed(*packages: str) -> dict[str, str]:
    """The packages' versions, or "not installed"."""
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def in_columns(rows: Sequence[Sequence[str]], *, numbers: bool = False) -> list[str]:
    """Rows of cells as lines of aligned columns. `numbers`: all columns but the first are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [str.ljust, *[str.rjust if numbers else str.ljust] * (len(widths) - 1)]
    return ["  ".join(side(cell, n) for side, cell, n in zip(sides, row, widths, strict=True)).rstrip() for row in rows]


def table(rows: Sequence[Sequence[object]], columns: Sequence[str]) -> str:
    """An aligned Markdown table: numbers right-aligned, floats with four digits, None as a dash.

    `rows`: one sequence of cells per row. Raises ValueError if a row has more or fewer cells than columns.
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
    if not columns:
        raise ValueError("the table has 0 columns; name at least one")
    for index, row in enumerate(rows):
        if len(row) != len(columns):
            raise ValueError(f"row {index} has {len(row)} cells for {len(columns)} columns; give one per column")
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
:root { color-scheme: light dark; --ink: #1a1a1a; --faint: #5f5f5f; --paper: #fff; --line: #d5d5d5; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #ececec; --faint: #a8a8a8; --paper: #16181c; --line: #3a3d44; }
}
body { max-width: 1200px; margin: 2rem auto; padding: 0 1rem; color: var(--ink); background: var(--paper);
       font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
img { width: 100%; height: auto; background: #fff; border-radius: 6px; }
.wide { overflow-x: auto; } .wide img { display: block; min-width: 45rem; } table { border-collapse: collapse; }
th, td { padding: .35rem .8rem; text-align: left; border-bottom: 1px solid var(--line); }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; }
.text { white-space: pre-wrap; overflow-wrap: anywhere; vertical-align: top; min-width: 12rem; }
dt { color: var(--faint); } dd { margin: 0; overflow-wrap: anywhere; }
"""


def save_html(
    path: str | Path,
    *,
    title: str,
    summary: str,
    rows: Sequence[Sequence[object]],
    columns: Sequence[str],
    tracks: Tracks,
    curves: Sequence[Curves],
    facts: Mapping[str, str],
    texts: Texts | None = None,
) -> None:
    """Writes one self-contained page: summary, table, timelines, curves, texts, facts; nothing is loaded.

    `summary`: text, with an empty line between paragraphs; `rows` and `columns` as for `table`; `tracks` as for
    `timeline_figure`; `facts`: name to value (versions).
    Of `rows`, `tracks`, `curves` and `facts`, empty ones are left out. All text is escaped. Errors as in
    `table`, `timeline_figure` and `write_file`.
    """
    body = [f"<h1>{escape(title)}</h1>"]
    body += [f"<p>{escape(' '.join(part.split()))}</p>" for part in summary.split("\n\n") if part.strip()]
    if rows:
        body.append(_html_table(rows, columns))
    if tracks:
        body.append("<h2>Timelines</h2>")
        body.append(_html_image(timeline_figure(tracks), _in_words(tracks)))
    for each in curves:
        body.append(f"<h2>{escape(each.title)}</h2>")
        known = {name: [value for value in values if value == value] for name, values in each.values.items()}
        last = "; ".join(f"{name} ends at {values[-1]:.4g}" for name, values in known.items() if values)
        body.append(_html_image(curve_figure(each), f"{each.title}. {last}"))
    if texts is not None:
        body += [f"<h2>{escape(texts.title)}</h2>", _html_texts(texts)]
    if facts:
        pairs = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items())
        body.append(f"<h2>How it was measured</h2>\n<dl>{pairs}</dl>")
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
{chr(10).join(body)}
</body>
</html>
"""
    write_file(path, page.encode())


def _in_words(tracks: Tracks) -> str:
    return "Timelines. " + "; ".join(f"{name}: {', '.join(headline(events))}" for name, events in tracks.items())


def _html_image(figure: Figure, words: str) -> str:
    data = base64.b64encode(_png(figure)).decode()
    return f'<div class="wide"><img alt="{escape(words)}" src="data:image/png;base64,{data}"></div>'


def _html_table(rows: Sequence[Sequence[object]], columns: Sequence[str]) -> str:
    (heading, *body), numeric = _cells(rows, columns)
    style = [' class="number"' if right else "" for right in numeric]
    lines = ["".join(f'<th scope="col"{s}>{escape(c)}</th>' for c, s in zip(heading, style, strict=True))]
    lines += ["".join(f"<td{s}>{escape(c)}</td>" for c, s in zip(row, style, strict=True)) for row in body]
    head, *rest = (f"<tr>{line}</tr>" for line in lines)
    return f'<div class="wide"><table>\n<thead>{head}</thead>\n<tbody>{"".join(rest)}</tbody>\n</table></div>'


def _html_texts(texts: Texts) -> str:
    def line(tag: str, cells: Sequence[object]) -> str:
        words = ("" if cell is None else escape(str(cell)) for cell in cells)
        return "<tr>" + "".join(f'<{tag} class="text">{each}</{tag}>' for each in words) + "</tr>"

    head, body = line("th", texts.columns), "\n".join(line("td", row) for row in texts.rows)
    return f'<div class="wide"><table>\n<thead>{head}</thead>\n<tbody>{body}</tbody>\n</table></div>'
