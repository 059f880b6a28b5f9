"""Measured numbers in the pages equal their files."""

from __future__ import annotations

import json

import pytest

from docs.figures import marks


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A page's mistakes, with one file of results."""
    folder = tmp_path / "bench" / "results"
    folder.mkdir(parents=True)
    data = {
        "split": {"ratio": 1.566, "low": 1.5, "high": 1.6494},
        "idle / all": [0.1, 0.2, 0.33],
        "tokens": 1234567,
        "off": -0.0213,
        "rows": [{"way": "DDP", "s": 2.0}, {"way": "ODC", "s": 1.6}, {"way": "DDP", "s": 1.0}],
    }
    (folder / "a.json").write_text(json.dumps(data))
    monkeypatch.setattr(marks, "ROOT", tmp_path)
    return lambda text: list(marks.mistakes("a.md", text))


def test_every_marked_number_is_in_its_file():
    assert [line for page, text in marks.pages().items() for line in marks.mistakes(page, text)] == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("\n1.56<!--a.json:split/ratio-->", "a.md:2: '1.56'<!--a.json:split/ratio-->: 1.56 should be 1.57"),
        ("1.57<!--a.json:*s*/ratio--> times", "names no number"),
        ("1.56 (1.50 to 1.65)<!--a.json:split-->", "1.56 should be 1.57"),
        ("2.1%<!--a.json:off-->", "2.1 should be -2.1"),
        ("1.57 <!--a.json:split/middle-->", "names no number"),
        ("1.57<!--b.json:split/ratio-->", "names no number"),
        ("1.57<!--a.json:split-->", "names no number"),
        ("1.57<!--see the results-->", "names no number"),
        ("1.57 (1.50 to 1.65)", "a.md:1: '1.50 to 1.65' has no mark"),
    ],
)
def test_wrong(results, text, said):
    (line,) = results(text)
    assert said in line
