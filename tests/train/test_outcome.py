"""What a run says at its end."""

from __future__ import annotations

from typing import Any

import pytest

from odc_triton.train.outcome import in_words

NOTHING = "Nothing was learned: in no step did the rewards of a prompt's completions differ."


@pytest.mark.parametrize(
    ("steps", "says"),
    [
        ([{"reward": 0.1, "groups_learned": 0.0}] * 2, True),
        ([{"reward": None, "groups_learned": 0.0}], True),  # no function applied
        ([{"reward": 0.1, "groups_learned": 0.0}, {"reward": 0.2, "groups_learned": 0.25}], False),
        ([{"reward": 0.1, "groups_learned": 0.0, "divergence": 0.3}], False),  # from a teacher
        ([{"loss": 2.0}], False),
        ([], False),
    ],
)
def test_nothing_was_learned(steps: list[dict[str, Any]], says: bool) -> None:
    usual = {"seconds": 1.0, "idle": 0.1, "tokens": 10, "skipped": 0, "loss": 0.0}
    lines = [{"step": at, **usual, **each} for at, each in enumerate(steps, start=1)]
    assert (NOTHING in in_words(lines, ranks=1)) is says
