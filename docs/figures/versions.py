"""Which version of the parameters ranks read, and when owners published it, magnified between two minibatches."""

from __future__ import annotations

from odc_triton.jobs.reports.trace import barriers

from .recorded import RECORDED, killed_events, log, versions_read
from .svg import WIDTH, Drawing

BAR, GAP, LEFT, RIGHT, READS, OWNERS = 24, 6, 70, WIDTH - 4, 34, 172
KINDS = ("rank0", "accumulate", "read")  # the colours of versions, in turn
SHOWN = ("stepping", "published")  # what owners show


def data() -> dict:
    """What each rank read and when; around the last exit and entry, the version of each owner's rows, or "step"."""
    last, reads = RECORDED["killed"]["minibatch"], versions_read()
    # The initial values, version 0, are published first.
    shown = [{rank: s for s, rank, _, number in log(name)[::-1] if number - 1 == last} for name in SHOWN]
    marks = {mark.label: mark.at_s for mark in barriers(killed_events())}
    exit_s, entry_s = marks[f"leave minibatch {last - 1}"], marks[f"enter minibatch {last}"]
    from_s, to_s = exit_s - 2e-3, entry_s + 5e-3
    owners = {}
    for owner in reads:
        steps_s, published_s = (each[owner] for each in shown)
        owners[owner] = [(from_s, steps_s, last - 1), (steps_s, published_s, "step"), (published_s, to_s, last)]
    return {"reads": reads, "owners": owners, "barriers": {"exit": exit_s, "entry": entry_s}, "window": [from_s, to_s]}


def draw(data: dict) -> str:
    drawing = Drawing("Each rank reads one version of all owners' rows; owners publish between barriers", height=312)
    per_s = (RIGHT - LEFT) / max(own[-1][1] for own in data["reads"].values())
    for rank, own in data["reads"].items():
        y = READS + rank * (BAR + GAP)
        drawing.text(0, y + 17, f"rank {rank}", more="strong")
        for start_s, end_s, versions in own:
            kind = KINDS[round(versions[0]) % 3] if len(set(versions)) == 1 else "bad"
            drawing.rect(LEFT + start_s * per_s, y, (end_s - start_s) * per_s, BAR, kind, more="reads")
            words = " ".join(f"{each:.0f}" for each in versions)
            drawing.text(LEFT + start_s * per_s + 6, y + 17, words, "paper", more="small strong")
    from_s, to_s = data["window"]
    x, per_s = LEFT + data["barriers"]["exit"] * per_s, (RIGHT - LEFT) / (to_s - from_s)
    drawing.line([(LEFT, OWNERS - 10), (x, READS + 3 * (BAR + GAP)), (RIGHT, OWNERS - 10)], "faint", more="magnifies")
    for owner, spans in data["owners"].items():
        y = OWNERS + owner * (BAR + GAP)
        drawing.text(0, y + 17, f"owner {owner}", more="strong")
        for start_s, end_s, version in spans:
            x, at = (RIGHT - 6, "end") if end_s == to_s else (LEFT + (start_s - from_s) * per_s + 6, "start")
            kind = "step" if version == "step" else KINDS[version % 3]
            drawing.rect(LEFT + (start_s - from_s) * per_s, y, (end_s - start_s) * per_s, BAR, kind, more="owns")
            drawing.text(x, y + 17, str(version), "paper", at=at, more="small strong")
    bottom = OWNERS + 3 * (BAR + GAP)
    for word, at_s in data["barriers"].items():
        x = LEFT + (at_s - from_s) * per_s
        drawing.line([(x, OWNERS - 6), (x, bottom)], "ink", more="barrier thick")
        drawing.text(x, bottom + 18, f"{word} barrier", at="middle", more="small")
    drawing.text(0, 16, "Read of owners 0, 1, 2: one version, never a mix", more="strong")
    words = f"Magnified: {1e3 * (to_s - from_s):.0f} ms in which owners step and publish"
    drawing.text(0, bottom + 42, words, more="strong")
    return str(drawing)
