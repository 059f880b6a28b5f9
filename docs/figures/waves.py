"""A sequence cut over ranks: the segments of one minibatch, in waves, and whose keys and values each reads."""

from __future__ import annotations

from odc_triton.balance import CostModel
from odc_triton.plan.entries import Segment
from odc_triton.plan.samples import Limits, Samples
from odc_triton.plan.split import split_plan

from .svg import WIDTH, Drawing

LENGTHS, RANKS, CAP = [32_000, 13_000, 7_000, 7_000, 6_000, 5_000, 4_500], 4, 11_000
LETTERS = "ABCDEFG"
LEFT, TOP, HIGH, LANE, GAP = 54, 36, 32, 54, 18


def data() -> dict:
    """Columns: waves, then unsplit samples. By rank, boxes: the sample, its tokens, the ranks whose rows it reads."""
    limits = Limits(ranks=RANKS, token_cap=CAP, split_tokens=sum(LENGTHS))
    made = split_plan(Samples.of(LENGTHS, CostModel.paper_7b()), limits)
    plan = made.split
    waves = plan.waves if plan else 0

    def box(entry: Segment | int) -> dict:
        if not isinstance(entry, Segment):
            return {"sample": entry, "tokens": LENGTHS[entry], "reads": []}
        reads = [each.holder.rank for each in plan.reads(entry)]
        return {"sample": entry.sample, "tokens": len(entry), "reads": reads}

    columns = [[[box(entry) for entry in part] for part in wave] for wave in zip(*made.ready, strict=True)]
    rest = [[box(entry) for pack in made.packs(rank)[waves:] for entry in pack] for rank in range(RANKS)]
    return {"columns": [*columns, rest], "waves": waves}


def draw(data: dict) -> str:
    title = (
        "Two long samples cut over four ranks, in two waves; arrows go from a segment's keys and values to its readers"
    )
    drawing = Drawing(title, height=TOP + 4 * LANE + 20)
    tokens = [max(sum(box["tokens"] for box in part) for part in column) for column in data["columns"]]
    per_token, x = (WIDTH - LEFT - GAP * (len(tokens) - 1)) / sum(tokens), float(LEFT)
    for number, column in enumerate(data["columns"]):
        drawing.text(x, 18, f"wave {number + 1}" if number < data["waves"] else "unsplit samples", more="strong")
        places: dict[tuple[int, int], float] = {}  # of a sample's segment on a rank
        for rank, part in enumerate(column):
            at, y = x, TOP + rank * LANE
            for box in part:
                places[box["sample"], rank] = at
                width = box["tokens"] * per_token
                tip = f"{box['tokens']:,} tokens of sample {LETTERS[box['sample']]}"
                drawing.rect(at, y, width - 2, HIGH, f"rank{rank}", tip=tip, more="pale segment")
                drawing.text(at + width / 2 - 1, y + 21, LETTERS[box["sample"]], at="middle")
                for place, owner in enumerate(box["reads"]):
                    lane = max(places[box["sample"], owner], at) + 11 + 13 * place
                    drawing.line([(lane, TOP + owner * LANE + HIGH), (lane, y - 1)], f"rank{owner}", more="arrow")
                at += width
        x += tokens[number] * per_token + GAP
    for rank in range(len(data["columns"][0])):
        drawing.text(0, TOP + rank * LANE + 21, f"rank {rank}")
    y = TOP + 4 * LANE + 4
    drawing.line([(WIDTH - 5000 * per_token, y - 5), (WIDTH - 2, y - 5)], "faint", more="thick")
    drawing.text(WIDTH - 5000 * per_token - 8, y, "5,000 tokens", "faint", at="end", more="small")
    return str(drawing)
