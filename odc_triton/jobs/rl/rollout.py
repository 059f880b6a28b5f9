"""A rollout: the step's prompts are taken from a queue, sampled and scored; then every rank gets all completions.

A rank takes a few prompts at a time, so ranks that drew long completions take fewer, and no rank waits per token. When
the queue is empty there is one barrier, at which the ranks exchange their completions (kilobytes): after it all of them
compute the same advantages and the same assignment. A rank that failed, or was asked to stop, empties the queue.
"""

from __future__ import annotations

import base64
import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...base.errors import TRACEBACK, GenerationFailed, RolloutFailed, describe
from ...base.events import ELSEWHERE
from ...engine.module import Engine
from ...plan.queue import Counter
from ..launcher.launch import Interrupted
from .generation import CompletionEngine, Request, Sampled, SamplingOptions
from .prompts import Prompt
from .rewards import RewardFailed, Rewards
from .turns import RolloutFunction, TurnEngine

_EMPTY = 1 << 40  # added to the queue's counter: nothing is left


@dataclass(frozen=True, kw_only=True)
class PromptSlot:
    """One prompt of a step, with the seed of each of its completions. `columns`: the names of those that reward
    functions are given, the same for all prompts that are sampled together.
    """

    prompt: Prompt
    seeds: list[int]
    columns: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """All ranks' completions, the same on every rank, by slot.

    rewards: [functions, slots, completions], NaN where a function did not apply; totals: their weighted sum, [slots,
    completions], NaN where none did. Seconds are means over ranks.
    """

    slots: list[PromptSlot]
    sampled: list[list[Sampled]]
    rewards: Tensor
    totals: Tensor
    rollout_s: float
    scoring_s: float


class Sampler:
    """Samples, by `function` if there is one, and scores, with the other ranks."""

    def __init__(
        self,
        engine: Engine,
        *,
        completions: CompletionEngine,
        rewards: Rewards,
        counter: Counter,
        tokenizer: Any,
        function: RolloutFunction | None,
        decode: int,
        stop: Callable[[], int | None],
    ) -> None:
        """`decode`: the most completions that this rank decodes together; never more than an equal part of all.
        `stop`: the signal for which the ranks are to stop, if there is one.
        """
        self.engine, self.completions, self.rewards, self.tokenizer = engine, completions, rewards, tokenizer
        self.counter, self.function, self._rollouts = counter, function, 0
        self.decode, self.stop = decode, stop
        self._scores = threading.Lock()  # reward functions are called one batch at a time

    def roll_out(self, slots: list[PromptSlot], options: SamplingOptions) -> Rollout | int:
        """The rollout of `slots`, or the signal for which the ranks stop instead. Collective.

        Raises RolloutFailed on all ranks if sampling or a reward raised on any; RankLost, DeadlineExceeded.
        """
        key = f"rollout/{self._rollouts}"
        self._rollouts += 1
        made, error = [], None
        together = self.together(slots)
        try:
            while self.stop() is None and (taken := self.take(key, len(slots), together)):
                made += self.complete(taken, slots, options)
        except Interrupted:  # in a rollout function
            pass
        except Exception as raised:  # raised below, after the exchange
            error = raised
        if error is not None or self.stop() is not None:
            self.counter.add(key, _EMPTY)
        message = {"made": made, "stop": self.stop(), "failed": None if error is None else reason_of(error)}
        messages = self.engine.exchange("exchange the completions", message)
        if self.engine.rank == 0:
            self.counter.delete_key(key)
        failed = {rank: theirs["failed"] for rank, theirs in enumerate(messages) if theirs["failed"] is not None}
        if failed:
            raise failure(failed) from error
        asked = next((theirs["stop"] for theirs in messages if theirs["stop"] is not None), None)
        return self.joined(slots, chain.from_iterable(each["made"] for each in messages)) if asked is None else asked

    def together(self, slots: Sequence[PromptSlot]) -> int:
        """The prompts that a rank samples together."""
        return max(1, min(self.decode // len(slots[0].seeds), math.ceil(len(slots) / self.engine.world)))

    def take(self, key: str, count: int, together: int) -> range:
        """The places of the next free prompts; empty when all are taken."""
        start = (self.counter.add(key, 1) - 1) * together
        return range(count)[start : start + together]

    def complete(self, taken: range, slots: list[PromptSlot], options: SamplingOptions) -> list[dict[str, Any]]:
        """The completions of `taken`, as JSON, with their rewards; none if asked to stop."""
        events = self.engine.events
        chosen = [slots[place] for place in taken]
        requests = [Request(ids=slot.prompt.ids, seeds=slot.seeds) for slot in chosen]
        remotely = self.completions.samples_remotely
        start_s = time.monotonic()
        # The many forwards of decoding are not shown one by one.
        with contextlib.nullcontext() if remotely else events.keeping("wait"):
            if self.function is None:
                sampled, more = self.completions.generate(requests, options), {}
            else:
                engine = TurnEngine(self.completions, requests, options, self.tokenizer, self.stop)
                made, more = self.function([slot.prompt.given for slot in chosen for _ in slot.seeds], engine)
                sampled = [[made.pop(0) for _ in slot.seeds] for slot in chosen]
        sampled_s = time.monotonic()
        label = f"{ELSEWHERE if remotely else ''}{len(taken)} prompts"
        events.add("rollout", start_s, sampled_s, label=label, microbatch=-1)
        if self.stop() is not None:
            return []
        flat = [(slot, one) for slot, group in zip(chosen, sampled, strict=True) for one in group]
        columns = {name: [slot.prompt.columns.get(name) for slot, _ in flat] for name in flat[0][0].columns} | more
        with self._scores:
            scores = self.rewards.score(
                [slot.prompt.given for slot, _ in flat],
                [self._completion(slot, one) for slot, one in flat],
                [one.ids for _, one in flat],
                columns,
            )
        scored_s = time.monotonic()
        events.add("scoring", sampled_s, scored_s, microbatch=-1)
        seconds = {"rollout_s": (sampled_s - start_s) / len(taken), "scoring_s": (scored_s - sampled_s) / len(taken)}
        messages, at = [], 0
        for place, group in zip(taken, sampled, strict=True):
            rewards = [of_function[at : at + len(group)] for of_function in scores]
            at += len(group)
            messages.append({"slot": place, "rewards": rewards, "sampled": [_packed(one) for one in group], **seconds})
        return messages

    def _completion(self, slot: PromptSlot, one: Sampled) -> Any:
        """As reward functions get it: text, or for messages the assistant's message."""
        text = self.tokenizer.decode(one.ids, skip_special_tokens=True)
        return text if isinstance(slot.prompt.given, str) else [{"role": "assistant", "content": text}]

    def group(self, made: dict[str, Any]) -> tuple[list[Sampled], Tensor, Tensor]:
        """Of one message: the completions, their rewards [functions, completions], and totals [completions]."""
        sampled, scores = [_unpacked(one) for one in made["sampled"]], made["rewards"]
        rewards = torch.tensor(scores, dtype=torch.float64).view(len(scores), len(sampled))
        totals = self.rewards.total(scores) if scores else [math.nan] * len(sampled)  # without functions
        return sampled, rewards, torch.tensor(totals, dtype=torch.float64)

    def joined(self, slots: list[PromptSlot], messages: Iterable[dict[str, Any]]) -> Rollout:
        made = sorted(messages, key=lambda each: each["slot"])
        sampled, rewards, totals = zip(*map(self.group, made), strict=True)
        world = self.engine.world
        return Rollout(
            slots=slots,
            sampled=[*sampled],
            rewards=torch.stack(rewards, dim=1),
            totals=torch.stack(totals),
            rollout_s=math.fsum(each["rollout_s"] for each in made) / world,
            scoring_s=math.fsum(each["scoring_s"] for each in made) / world,
        )


def failure(failed: dict[int, str]) -> RolloutFailed:
    """The error for all ranks, of the reasons by rank."""
    words = "; ".join(f"rank {rank}: {text.partition(TRACEBACK)[0]}" for rank, text in failed.items())
    _, mark, trace = next(iter(failed.values())).partition(TRACEBACK)  # one is enough
    return RolloutFailed(list(failed), f"a rollout failed ({words}){mark}{trace}")


_LISTS = {"ids": "<i4", "logps": "<f4", "mask": "i1", "prompt": "<i4"}  # of a completion, with their dtypes


def _packed(one: Sampled) -> dict[str, Any]:
    lists = {name: np.asarray(values, dtype) for name, dtype in _LISTS.items() if (values := getattr(one, name))}
    return {"ended": one.ended} | {name: base64.b64encode(each.tobytes()).decode() for name, each in lists.items()}


def _unpacked(sent: dict[str, Any]) -> Sampled:
    sent = {"ids": "", "logps": ""} | sent
    lists = {name: np.frombuffer(base64.b64decode(sent[name]), _LISTS[name]).tolist() for name in _LISTS.keys() & sent}
    return Sampled(ended=sent["ended"], **lists)


def reason_of(error: BaseException) -> str:
    """A failed function's own message, or an error with its class."""
    return str(error) if isinstance(error, (RewardFailed, GenerationFailed)) else describe(error)
