"""Rewards of the tests' jobs. A process of their own imports them, in each test: nothing slow to import may be here."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence


def vowels(completions: Sequence[str], wanted: Sequence[str], **_: object) -> list[float]:
    """The share of the wanted letters in each completion."""
    return [
        sum(map(text.count, letters)) / max(len(text), 1) for text, letters in zip(completions, wanted, strict=True)
    ]


def all_alike(completions: list[str], **columns: list[float]) -> list[float | None]:
    values = columns.get("held_out") or [0.1] * len(completions)
    return [*values[:-1], None]  # None: nothing is said of it


def second_token(completion_ids: list[list[int]], **_: object) -> list[float]:
    return [float(ids[1]) for ids in completion_ids]


def raising(prompts: list[str], completions: list[str], **_: object) -> list[float]:
    raise KeyError(f"nothing known of {len(completions)}")


def of_function(prompts: list[str], prompt_text: list[str], **_: object) -> list[float | None]:
    """Nothing, and an error if the column of a rollout function is not there."""
    return [None if text == prompt else 1.0 for text, prompt in zip(prompt_text, prompts, strict=True)]


def disturbed(prompts: list[str], completions: list[str], wanted: list[str], **_: object) -> list[float]:
    """`vowels`. At the prompt in ODC_TEST_REWARD, "raises: PROMPT" or "is late: PROMPT", it does so, and writes the
    time to the file ODC_TEST_STRUCK.
    """
    what, _, prompt = os.environ.get("ODC_TEST_REWARD", "").partition(": ")
    if prompt in prompts:
        with open(os.environ["ODC_TEST_STRUCK"], "a") as file:
            file.write(f"{time.time()}\n")
        if what == "raises":
            raise KeyError("told to")
        time.sleep(60)
    return vowels(completions, wanted)
