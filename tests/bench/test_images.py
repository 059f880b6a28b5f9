"""What the measurements of models with pictures train, count and compare."""

from __future__ import annotations

from pathlib import Path

from bench import pictures


def test_the_mixture_is_the_one_that_was_drawn(tmp_path: Path) -> None:
    pictures.write(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == pictures.FILE.read_text()
    samples = [sample for minibatch in pictures.read() for sample in minibatch]
    assert {len(own) for _, own in samples} == {0, 1, 2, 3, 4}
    assert sum(not own for _, own in samples) > len(samples) / 2
