"""docs/gpus.md has the stages of the suite for GPUs, and its commands give them the time that they need."""

from __future__ import annotations

import re
from pathlib import Path

from bench.suites.gpu.first import SECTIONS
from bench.suites.gpu.plan import FIRST, STAGES

PAGE = (Path(__file__).parents[2] / "docs" / "gpus.md").read_text(encoding="utf-8")


def _seconds(stages: tuple[str, ...]) -> dict[str, int]:
    return {stage: sum(run.seconds for run in STAGES[stage].values()) for stage in stages}


def test_stages_and_their_time() -> None:
    table = {stage: int(seconds) for stage, seconds in re.findall(r"^\| `([\w-]+)` \| (\d+) s \|", PAGE, re.M)}
    assert table == _seconds(FIRST)
    given = {
        words: int(seconds) for seconds, words in re.findall(r"bench\.suites\.gpu --seconds (\d+)(.*)$", PAGE, re.M)
    }
    assert sum(table.values()) <= given.pop("") <= 1800
    ((words, seconds),) = given.items()
    assert sum(_seconds(tuple(words.split())).values()) <= seconds


def test_sections_of_the_first_quarter() -> None:
    table = dict(re.findall(r"^\| `([\w+ ]+)` \| [^|]+ \| ([^|]+) \|$", PAGE.partition("## What runs")[0], re.M))
    assert list(table.items()) == [(name, section.passes) for name, section in SECTIONS.items()]
