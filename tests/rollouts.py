"""Rollout functions of the tests' jobs."""

from __future__ import annotations

from typing import Any


def turns(prompts: list[Any], engine: Any) -> dict[str, list]:
    """Up to three turns of at most a quarter of the tokens; between them tokens from outside, also after an end.

    Prompts are without their first token, as if the function had a template of its own.
    """
    prompt_ids = [each[1:] for each in engine.prompt_ids]
    most, outside = engine.options.max_new_tokens // 4, engine.options.max_new_tokens // 8
    ids, logps, mask = ([[] for _ in prompts] for _ in range(3))
    rows = list(range(len(prompts)))
    for turn in range(3):
        made = engine.generate([prompt_ids[row] + ids[row] for row in rows], most, rows=rows)
        going = [row for row, one in zip(rows, made, strict=True) if turn < 2 and sum(one.ids) % 3]
        for row, one in zip(rows, made, strict=True):
            more = [4 + (sum(one.ids) + place) % 50 for place in range(outside)] if row in going else []
            ids[row] += one.ids + more
            logps[row] += one.logps + [None] * len(more)
            mask[row] += [1] * len(one.ids) + [0] * len(more)
        rows = going
    return {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": logps, "env_mask": mask}


def one_turn(prompts: list[Any], engine: Any) -> dict[str, list]:
    """What is sampled without a function."""
    made = engine.generate(engine.prompt_ids)
    ids, logps = [one.ids for one in made], [one.logps for one in made]
    return {"prompt_ids": engine.prompt_ids, "completion_ids": ids, "logprobs": logps, "prompt_text": prompts}


def raising(prompts: list[Any], engine: Any) -> dict[str, list]:
    raise KeyError(f"no tool for {len(prompts)}")
