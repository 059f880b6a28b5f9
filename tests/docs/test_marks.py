"""Measured numbers in the pages equal their files."""

from __future__ import annotations

from docs.figures import marks


def test_every_marked_number_is_in_its_file():
    assert [line for page, text in marks.pages().items() for line in marks.mistakes(page, text)] == []
    (line,) = marks.mistakes("a.md", "1.57 (1.50 to 1.65)")
    assert "'1.50 to 1.65' has no mark" in line
