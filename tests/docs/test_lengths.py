"""The page "Try lengths like yours": its numbers are the command's, and its timelines have the simulator's shares."""

from __future__ import annotations

import re
import shlex
from collections import Counter

import pytest

from docs._ext import lengths
from odc_triton.base.events import Event
from odc_triton.base.trace import segments
from odc_triton.cli.command import main


@pytest.mark.parametrize(("name", "ranks", "samples"), [("chat", 2, 8), ("longalign", 4, 1), ("aime", 4, 2)])
def test_the_command_prints_the_cells_numbers(
    name: str, ranks: int, samples: int, capsys: pytest.CaptureFixture[str]
) -> None:
    found = lengths.cell(name, ranks, samples)
    assert main(shlex.split(found["command"].replace("\\\n", ""))[1:]) == 0
    printed = capsys.readouterr().out
    rows = [[part.strip() for part in line.split("|")[1:-1]] for line in printed.splitlines() if line.startswith("| ")]
    of_name = {row[2]: row for row in rows}
    assert found["ways"][0]["name"] == next(row[2] for row in rows if row[2].startswith("FSDP2"))  # fastest come first
    assert [(way["step"], way["idle"]) for way in found["ways"]] == [
        (of_name[way["name"]][3], of_name[way["name"]][5]) for way in found["ways"]
    ]
    assert found["ways"][0]["name"] in printed.splitlines()[-1]


def test_merging_keeps_every_ranks_shares() -> None:
    """Spans of 1 to 9 ms, most of them shorter than a pixel of 5 ms."""
    events = []
    for rank in range(2):
        at_s = 0.0
        for step in range(200):
            took_s = 1e-3 * (1 + (7 * step + rank) % 9)
            kind = ("forward", "wait", "backward")[step % 3]
            events.append(
                Event(rank=rank, kind=kind, start_s=at_s, end_s=at_s + took_s, minibatch=0, microbatch=0, label="")
            )
            at_s += took_s
    rows = lengths.encoded(events, 0.5e-3)
    for row, found in zip(rows, segments(events).values(), strict=True):
        drawn, real = Counter(), Counter()
        spans = re.findall(r"([a-z])(\d+)", row)
        for state, tenths in spans:
            drawn[state] += int(tenths)
        for start_s, end_s, state in found:
            real["w" if state == "unrecorded" else state[0]] += (end_s - start_s) / 0.5e-3
        assert drawn == pytest.approx(real, abs=len(spans) / 2)
        assert sum(drawn.values()) == pytest.approx(sum(real.values()), abs=1)
        assert sum(int(tenths) < 9 for _, tenths in spans) <= 3  # one of each state, at the end
