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

from ..base.errors import GenerationFailed, describe
from ..comm.launch import Interrupted
from .generation import CompletionEngine, Request, Sampled, SamplingOptions
from .prompts import completion_seed
from .reward_process import find_function, trace_of

_LISTS = ("prompt_ids", "completion_ids", "logprobs", "env_mask")


class TurnEngine:
    """What a rollout function samples with: any completion engine, for the completions of its prompts.

    `tokenizer`; `options`: the `SamplingOptions`, whose temperature is 0 in evaluation; `prompt_ids`: the tokens of
    each prompt, with the template's header of the assistant's turn.
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
        self._seeds = [seed for each in requests for seed in each.seeds]
        self._turns, self._starts = [0] * len(self._seeds), [0] * len(self._seeds)
        self._completions, self._stop = completions, stop

    def generate(
        self,
        ids: Sequence[Sequence[int]],
        max_new_tokens: int | None = None,
        *,
        rows: Sequence[int] | None = None,
        stop_tokens: Sequence[int] = (),
    ) -> list[Sampled]:
        """One turn: the next tokens of the completions `rows`, by default all, after `ids`, which include the prompt.

        `rows`: the places of their prompts among the prompts. A turn ends with an end token of the options or one of
        `stop_tokens`; at `max_new_tokens`; and where the completion has as many as the options allow: then it is empty.

        Its random numbers depend on the completion's seed and on how many turns that had, not on the other rows.
        """
        rows = range(len(self._seeds)) if rows is None else rows
        if len(ids) != len(rows) or len({*rows}) != len(rows):
            raise ValueError(
                f"generate has {len(ids)} lists of tokens for the completions {[*rows][:8]}: give one for each of the "
                f"{len(self._seeds)} prompts, or rows=, the places of those that go on"
            )
        left = []
        for row, some in zip(rows, ids, strict=True):
            if self._turns[row] == 0:
                self._starts[row] = len(some)
            rest = self._starts[row] + self.options.max_new_tokens - len(some)
            left.append(rest if max_new_tokens is None else min(rest, max_new_tokens))
        made = [Sampled(ids=[], logps=[], ended=False)] * len(rows)
        if wanted := [at for at, most in enumerate(left) if most > 0]:
            ends = (*self.options.end_tokens, *stop_tokens)
            options = replace(self.options, max_new_tokens=max(left), end_tokens=ends)
            requests = [Request(ids=[*ids[at]], seeds=[self._seed(rows[at])]) for at in wanted]
            for at, (one,) in zip(wanted, self._completions.generate(requests, options), strict=True):
                whole = len(one.ids) <= left[at]  # others had more left
                made[at] = Sampled(ids=one.ids[: left[at]], logps=one.logps[: left[at]], ended=one.ended and whole)
        if (signal := self._stop()) is not None:
            raise Interrupted(signal)
        for row in rows:
            self._turns[row] += 1
        return made

    def _seed(self, row: int) -> int:
        """Of the first turn the completion's own, so that a function of one turn samples what no function would."""
        seed, turn = self._seeds[row], self._turns[row]
        return completion_seed(seed, turn, 0, 0) if turn else seed


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
            found = self._function(copy.deepcopy(list(prompts)), engine)
        except Exception as error:
            raise GenerationFailed(f"rollout {self.name} raised {describe(error)}\n{trace_of(error)}") from error
        try:
            return self._read(found, len(prompts), engine)
        except (TypeError, ValueError) as error:
            raise GenerationFailed(f"rollout {self.name} returned something else than TRL's: {error}") from None

    def _read(self, found: Any, count: int, engine: TurnEngine) -> tuple[list[Sampled], dict[str, Any]]:
        missing = _LISTS[:3] if not isinstance(found, Mapping) else [name for name in _LISTS[:3] if name not in found]
        if missing:
            raise ValueError(f"a {type(found).__name__} without {', '.join(missing)}")
        columns = {"env_mask": None, **found}
        for name, values in columns.items():
            if values is None or (name not in _LISTS and not isinstance(values, list)):
                columns[name] = [values] * count  # as TRL does
            elif len(values) != count:
                raise ValueError(f"{len(values)} {name} for {count} prompts; return one for each")
        rows = zip(engine.prompt_ids, *(columns.pop(name) for name in _LISTS), strict=True)
        return [self._one(f"of completion {row}", *each, engine.options) for row, each in enumerate(rows)], columns

    def _one(
        self, where: str, own: list[int], prompt: Any, ids: Any, logps: Any, mask: Any, options: SamplingOptions
    ) -> Sampled:
        prompt, ids = ([operator.index(token) for token in each] for each in (prompt, ids))
        mask = [1] * len(ids) if mask is None else [operator.index(each) for each in mask]
        logps = (
            [math.nan] * len(ids) if logps is None else [math.nan if each is None else float(each) for each in logps]
        )
        longest = max(self._longest, len(own))
        if not prompt or not any(mask):
            raise ValueError(f"{where} no token of the {'model' if prompt else 'prompt'}; return at least one")
        if not 0 <= min(prompt + ids) <= max(prompt + ids) < self._vocabulary:
            raise ValueError(f"{where} {min(prompt + ids)} to {max(prompt + ids)}; tokens are under {self._vocabulary}")
        if len(prompt) > longest:
            raise ValueError(f"{where} {len(prompt)} prompt_ids; the data's longest prompt has {longest}: add to these")
        if len(ids) > options.max_new_tokens:
            raise ValueError(f"{where} {len(ids)} completion_ids; --max-new-tokens is {options.max_new_tokens}")
        if len(mask) != len(ids) or len(logps) != len(ids) or {*mask} - {0, 1}:
            lists = f"{len(logps)} logprobs and {len(mask)} env_mask for {len(ids)} completion_ids"
            raise ValueError(f"{where} {lists}; return a number or None, and 0 or 1, for each")
        prompt = None if prompt == own else prompt
        return Sampled(ids=ids, logps=logps, ended=ids[-1] in options.end_tokens, mask=mask, prompt=prompt)
