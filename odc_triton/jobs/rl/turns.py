"""Completions of several turns: a function samples one turn, adds what comes from outside (a tool's output), goes on.

It has the signature of TRL's `rollout_func`, with a `TurnEngine` in the place of TRL's trainer:

    def rollout(prompts, engine) -> {"prompt_ids": …, "completion_ids": …, "logprobs": …, "env_mask": …, **columns}
"""

from __future__ import annotations

import copy
import math
import operator
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ...base.errors import GenerationFailed, describe
from ..launcher.launch import Interrupted
from .generation import CompletionEngine, Request, Sampled, SamplingOptions
from .prompts import completion_seed
from .reward_process import find_function, trace_of

Ints = Sequence[int]
_LISTS = ("prompt_ids", "completion_ids", "logprobs", "env_mask")


class TurnEngine:
    """What a rollout function samples with. `options`: temperature (0 in evaluation), max_new_tokens, end_tokens;
    `prompt_ids`: the tokens of each prompt, with the template's header of the assistant's turn.
    """

    def __init__(
        self,
        completions: CompletionEngine,
        requests: Sequence[Request],
        options: SamplingOptions,
        tokenizer: Any,
        stop: Callable[[], int | None] = lambda: None,
    ) -> None:
        self.tokenizer, self.options = tokenizer, options
        self.prompt_ids = [list(each.ids) for each in requests for _ in each.seeds]
        self._seeds = [seed for each in requests for seed in each.seeds]  # of the next turn
        self._limits: dict[int, int] = {}  # by row: tokens, with the prompt
        self._completions, self._stop = completions, stop

    def generate(
        self,
        ids: Sequence[Ints],
        max_new_tokens: int | None = None,
        *,
        rows: Ints | None = None,
        stop_tokens: Ints = (),
    ) -> list[Sampled]:
        """One turn: the next tokens of the completions `rows`, by default all, after `ids`, which include the prompt.

        `rows`: the places of their prompts among the prompts. A turn ends with an end token of the options or one of
        `stop_tokens`; at `max_new_tokens`; and where the completion has as many as the options allow: then it is empty.

        Its random numbers depend on the completion's seed and on how many turns that had, not on the other rows.
        """
        rows = range(len(self._seeds)) if rows is None else rows
        if not len(ids) == len(rows) == len({*rows}):
            raise ValueError(
                f"generate has {len(ids)} lists of tokens for the prompts {[*rows][:8]}: give one for each"
            )
        options, left = self.options, []
        for row, some in zip(rows, ids, strict=True):
            limit = self._limits.setdefault(row, len(some) + options.max_new_tokens) - len(some)
            left.append(limit if max_new_tokens is None else min(limit, max_new_tokens))
        made = [Sampled(ids=[], logps=[], ended=False)] * len(rows)
        if wanted := [at for at, most in enumerate(left) if most > 0]:
            options = replace(options, max_new_tokens=max(left), end_tokens=(*options.end_tokens, *stop_tokens))
            requests = [Request(ids=[*ids[at]], seeds=[self._seeds[rows[at]]]) for at in wanted]
            for at, (one,) in zip(wanted, self._completions.generate(requests, options), strict=True):
                whole = len(one.ids) <= left[at]  # others had more left
                made[at] = Sampled(ids=one.ids[: left[at]], logps=one.logps[: left[at]], ended=one.ended and whole)
        if (signal := self._stop()) is not None:
            raise Interrupted(signal)
        for row in rows:
            self._seeds[row] = completion_seed(self._seeds[row], 0, 0, 0)
        return made


def find_rollout(name: str) -> Callable[..., Any]:
    """The function "module:function". Raises ValueError with the reason if there is none."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # as for rewards
    if isinstance(found := find_function("rollout", name), str):
        raise ValueError(found)
    return found


class RolloutFunction:
    """The rollout function `name`, and the check of what it returns.

    `longest`: the tokens of the data's longest prompt, which the run has memory for. `vocabulary`: of the model.
    """

    def __init__(self, name: str, *, longest: int, vocabulary: int) -> None:
        self.name, self._function = name, find_rollout(name)
        self._longest, self._vocabulary = longest, vocabulary

    @torch.no_grad()
    def __call__(self, prompts: Sequence[Any], engine: TurnEngine) -> tuple[list[Sampled], dict[str, Any]]:
        """A completion of each of `prompts`, and columns for reward functions.

        Raises GenerationFailed, which names the function, if it raised or returned something else.
        """
        try:
            found = self._function([copy.deepcopy(prompt) for prompt in prompts], engine)
        except Exception as error:
            raise GenerationFailed(f"rollout {self.name} raised {describe(error)}\n{trace_of(error)}") from error
        try:
            return self._read(found, len(prompts), engine)
        except (TypeError, ValueError) as error:
            raise GenerationFailed(f"rollout {self.name} returned something else than TRL's: {error}") from None

    def _read(self, found: Any, count: int, engine: TurnEngine) -> tuple[list[Sampled], dict[str, Any]]:
        if not isinstance(found, Mapping) or not found.keys() >= {*_LISTS[:3]}:
            has = ", ".join(map(str, found)) if isinstance(found, Mapping) else type(found).__name__
            raise ValueError(f"{has or 'nothing'}; return a dict with {', '.join(_LISTS[:3])}")
        columns = {"env_mask": None, **found}
        for name, values in columns.items():
            if values is None or (name not in _LISTS and not isinstance(values, list)):
                columns[name] = [values] * count  # as TRL does
            elif len(values) != count:
                raise ValueError(f"{len(values)} {name} for {count} prompts; return one for each")
        rows = zip(engine.prompt_ids, *(columns.pop(name) for name in _LISTS), strict=True)
        return [self._one(f"completion {row} has", engine.options, *each) for row, each in enumerate(rows)], columns

    def _one(self, has: str, options: SamplingOptions, own: list[int], *lists: Any) -> Sampled:
        prompt, ids = ([operator.index(token) for token in each] for each in lists[:2])
        logps = [math.nan if each is None else float(each) for each in lists[2] or [None] * len(ids)]
        mask = [1] * len(ids) if lists[3] is None else [operator.index(each) for each in lists[3]]
        longest, most = max(self._longest, len(own)), options.max_new_tokens
        room = f"{longest}, as the data's longest prompt, and --max-new-tokens {most}"
        if not prompt or not any(mask):
            raise ValueError(f"{has} no token of the {'model' if prompt else 'prompt'}; return at least one")
        if not 0 <= min(prompt + ids) <= max(prompt + ids) < self._vocabulary:
            raise ValueError(f"{has} {min(prompt + ids)} to {max(prompt + ids)}; tokens are under {self._vocabulary}")
        if len(prompt) > longest or len(ids) > most:
            raise ValueError(f"{has} {len(prompt)} prompt_ids and {len(ids)} completion_ids; return at most {room}")
        if not len(ids) == len(mask) == len(logps) or {*mask} - {0, 1}:
            lists = f"{len(ids)} completion_ids, {len(logps)} logprobs and {len(mask)} env_mask"
            raise ValueError(f"{has} {lists}; return a number or None, and 0 or 1, for each")
        prompt = None if prompt == own else prompt
        return Sampled(ids=ids, logps=logps, ended=ids[-1] in options.end_tokens, mask=mask, prompt=prompt)
