"""Reward functions, with TRL's signature, called in a process of their own with a timeout."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from .reward_process import ProcessEnded, RewardProcess

_START_S = 300.0  # for importing the functions, which may load a model
_PROMPT_CHARACTERS = 200
_LARGEST = 1e30  # of a reward, weighted or not: sums over a rollout stay finite in fp32, the loss's dtype


class RewardFailed(RuntimeError):
    """A reward function returned no rewards; the message names it, and the prompt if it can be found."""


class Rewards:
    """Reward functions, each one of `named_rewards.NAMES`, or a "module:function" with TRL's signature, so that TRL's
    users can reuse theirs:

        def exact(prompts, completions, completion_ids, answer, **columns) -> list[float | None]:
            return [float(text == right) for text, right in zip(completions, answer)]

    They are called by keyword, with one entry for each completion: `prompts`, `completions` (strings, or lists of
    messages), `completion_ids` (lists of tokens), and the dataset's other columns. A coroutine function is awaited.
    None means that the function does not apply. TRL's `trainer_state`, `log_extra` and `log_metric` are not passed.

    All functions run in one process. The first call starts it, and it ends when this process does. If a function takes
    more than `timeout_s` seconds for a batch, the process is killed, and the next call restarts it. Call from one
    thread that lives as long as this object, as the kernel kills the process when that thread ends. `weights`: of each
    function, by default 1. `max_new_tokens`: of a completion, for `length`.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        weights: Sequence[float] | None = None,
        timeout_s: float = 60.0,
        max_new_tokens: int = 512,
    ) -> None:
        self.names = list(names)
        self.weights = [1.0] * len(self.names) if weights is None else [float(weight) for weight in weights]
        self.timeout_s, self.max_new_tokens = timeout_s, max_new_tokens
        self._process: RewardProcess | None = None

    def check(self, columns: list[str] | None = None, held_out: list[str] | None = None) -> None:
        """Imports the functions, so that a job can fail before its ranks start; `close` when done.

        `columns`, `held_out`: of the data and of the evaluation's, if known. Raises ValueError with the module or
        function and the remedy.
        """
        if self.names:
            self._running(columns, held_out)

    def score(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[Any]],
    ) -> list[list[float]]:
        """The reward of each function for each completion, [function][sample]; NaN where a function returned None.

        `columns`: as many values as completions for each of the dataset's other columns. Raises
        RewardFailed.
        """
        batch = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids}
        batch = {name: list(values) for name, values in {**columns, **batch}.items()}
        return [self._rewards_of(function, batch) for function in range(len(self.names))]

    def total(self, scores: Sequence[Sequence[float]]) -> list[float]:
        """The weighted sum over functions of the result of `score`, for each sample, as in TRL before normalisation.

        NaN only if no function applies.
        """
        return [
            math.nan
            if all(map(math.isnan, sample))
            else sum(weight * score for weight, score in zip(self.weights, sample, strict=True) if score == score)
            for sample in zip(*scores, strict=True)
        ]

    def close(self) -> None:
        """Ends the process, if there is one."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def _running(self, *columns: list[str] | None) -> RewardProcess:
        if self._process is None:
            try:
                settings = {"timeout_s": self.timeout_s, "max_new_tokens": self.max_new_tokens}
                self._process = RewardProcess(self.names, columns, timeout_s=_START_S, settings=settings)
            except ProcessEnded as end:
                raise ValueError(f"while importing the rewards {', '.join(self.names)} {end}") from None
            except TimeoutError:
                raise ValueError(
                    f"importing the rewards {', '.join(self.names)} took more than {_START_S:g} s: do slow work in a "
                    f"function's first call"
                ) from None
        return self._process

    def _rewards_of(self, function: int, batch: dict[str, list]) -> list[float]:
        reward, count = f"reward {self.names[function]}", len(batch["prompts"])
        has = f"; it had {count} completions, the first of the prompt {_prompt(batch, 0)}"
        self._running()  # starting the process does not count
        deadline = time.monotonic() + self.timeout_s
        try:
            answer = self._call(function, batch, deadline)
        except TimeoutError:
            raise RewardFailed(
                f"{reward} did not return within its timeout of {self.timeout_s:g} s{has}: make it faster, or raise "
                f"--reward-timeout-s"
            ) from None
        except ProcessEnded as end:
            raise RewardFailed(f"in {reward} {end}{has}") from None
        if "raised" in answer:
            raise RewardFailed(f"{reward} raised {answer['raised']}{has}\n{answer['trace']}")
        if "returned" in answer:
            raise RewardFailed(f"{reward} returned {answer['returned']}: return a list of {count} numbers")
        rewards = answer["rewards"]
        if len(rewards) != count:
            number = len(rewards) if len(rewards) < count else f"more than {count}"
            raise RewardFailed(f"{reward} returned {number} rewards for {count} completions: return one for each")
        for index, each in enumerate(rewards):
            if isinstance(each, str):
                raise RewardFailed(
                    f"{reward} returned {each} for {_place(batch, index)}: return a finite number, or None where it "
                    f"does not apply"
                )
            if each is not None and abs(each) * max(1.0, abs(self.weights[function])) > _LARGEST:
                raise RewardFailed(
                    f"{reward} returned {each:g}, with the weight {self.weights[function]:g}, for "
                    f"{_place(batch, index)}: means and deviations of such rewards overflow; return numbers up to "
                    f"{_LARGEST:g}"
                )
        return [math.nan if each is None else each for each in rewards]

    def _call(self, function: int, batch: dict[str, list], deadline: float) -> dict[str, Any]:
        process = self._running()
        try:
            return process.call(function, batch, deadline=deadline)
        except BaseException:  # its answer may still arrive, and would be taken for the next call's
            self._process = None
            process.kill()
            raise


def _place(batch: dict[str, list], index: int) -> str:
    return f"completion {index + 1} of {len(batch['prompts'])}, of the prompt {_prompt(batch, index)}"


def _prompt(batch: dict[str, list], index: int) -> str:
    prompt = batch["prompts"][index]
    return repr((prompt if isinstance(prompt, str) else repr(prompt))[:_PROMPT_CHARACTERS])
