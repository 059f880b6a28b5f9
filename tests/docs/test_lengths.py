"""The page "Try lengths like yours": its numbers are the command's."""

from __future__ import annotations

import shlex

import pytest

from docs._ext import lengths
from odc_triton.tools.cli.command import main


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
    assert found["ways"][0]["name"] in printed.splitlines()[-2]
