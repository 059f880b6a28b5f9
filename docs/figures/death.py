"""One of three ranks is killed in a minibatch: when each other rank saw it, and where."""

from __future__ import annotations

from odc_triton.jobs.reports.trace import barriers

from .recorded import RECORDED, killed_events, log
from .svg import WIDTH, Drawing
from .timeline import bracket, paint, present

TOP, BAR, GAP, RIGHT = 28, 32, 62, 20
WHERE = {"the shards": "at its next microbatch", "leave mini": "at the exit barrier"}


def data() -> dict:
    """From the last entry on: spans of each rank, the kill, and by rank when and where it saw it, and its error."""
    last, victim = RECORDED["killed"]["minibatch"], RECORDED["killed"]["victim"]
    events = [event for event in killed_events() if event.minibatch == last and not event.label.startswith("enter")]
    start_s = next(mark.at_s for mark in barriers(killed_events()) if mark.label == f"enter minibatch {last}")
    (killed_s,) = (at_s for at_s, *_ in log("killed"))
    rows = {rank: [] for rank in range(3)}
    for event in sorted(events, key=lambda event: event.start_s):
        rows[event.rank].append((event.start_s - start_s, event.end_s - start_s, event.kind))
    # What the victim did not log: it reads where a forward begins and where it ends, and died in a backward.
    begins_s, ends_s = [at_s for at_s, rank, *_ in log("read") if rank == victim][-2:]
    rows[victim] += [
        (begins_s - start_s, ends_s - start_s, "forward"),
        (ends_s - start_s, killed_s - start_s, "backward"),
    ]
    saw = {}
    for at_s, rank, _, (peer, alive) in log("alive"):
        if not alive and rank not in saw:
            error = next(text for _, own, _, text in log("error") if own == rank)
            saw[rank] = {"seconds": at_s - start_s, "of": peer, "error": error}
    return {"rows": rows, "victim": victim, "killed": killed_s - start_s, "saw": saw}


def draw(data: dict) -> str:
    drawing = Drawing("Three ranks over time; one is killed, and the others name it within half a second", height=318)
    per_s = (WIDTH - RIGHT) / max(each["seconds"] for each in data["saw"].values())
    bottom = paint(drawing, data["rows"], x=0, y=TOP, per_s=per_s, height=BAR, gap=GAP)
    x = data["killed"] * per_s
    for rank in data["rows"]:
        y = TOP + rank * (BAR + GAP)
        drawing.text(0, y - 10, f"rank {rank}", more="strong")
        drawing.line([(x, y - 3), (x, y + BAR + 3)], "bad", more="kill thick")
        if rank == data["victim"]:
            drawing.text(x + 10, y + 21, "SIGKILL, in a backward", "bad", more="strong")
            continue
        saw = data["saw"][rank]
        where = next(words for start, words in WHERE.items() if f"'{start}" in saw["error"])
        drawing.text(56, y - 10, f"raises “rank {saw['of']} died” {where}")
        seen = saw["seconds"] * per_s
        drawing.dot(seen, y + BAR / 2, "bad", tip=saw["error"])
        bracket(drawing, x, seen, y + BAR + 9, f"{1e3 * (saw['seconds'] - data['killed']):.0f} ms", below=True)
    drawing.legend(0, bottom + 54, present(data["rows"]))
    return str(drawing)
