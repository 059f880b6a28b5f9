"""A rollout: the step's prompts are taken from a queue, sampled and scored; then every rank gets all completions.

A rank takes a few prompts at a time, so ranks that drew long completions take fewer, and no rank waits per token. When
the queue is empty there is one barrier, at which the ranks exchange their completions (kilobytes): after it all of them
compute the same advantages and the same assignment. A rank that failed, or was asked to stop, empties the queue.
"""

from __future__ import annotations

import base64
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..balance.queue import Counter
from ..base.errors import TRACEBACK, GenerationFailed, RolloutFailed, describe
from ..comm.launch import Interrupted
from ..engine.engine import Engine
from .generation import CompletionEngine, Request, Sampled, SamplingOptions
from .prompts import Prompt
from .rewards import RewardFailed, Rewards
from .turns import RolloutFunction, TurnEngine

Span = tuple[str, float, float, str]  # kind, start and end in seconds, label: of an event
_EMPTY = 1 << 40  # added to the queue's counter: nothing is left


@dataclass(frozen=True, kw_only=True)
class PromptSlot:
    """One prompt of a step, with the seed of each of its completions."""

    prompt: Prompt
    seeds: list[int]


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """All ranks' completions, the same on every rank, by slot. None if the ranks agreed to stop.

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
        columns: Sequence[str],
        function: RolloutFunction | None = None,
    ) -> None:
        self.engine, self.completions, self.rewards, self.tokenizer = engine, completions, rewards, tokenizer
        self._counter, self._columns, self._rollouts, self._function = counter, columns, 0, function

    def roll_out(
        self, slots: list[PromptSlot], options: SamplingOptions, *, decode: int, stop: Callable[[], int | None]
    ) -> Rollout | int:
        """The rollout of `slots`, or the signal for which the ranks stop instead. Collective.

        `decode`: the most completions that this rank decodes together; never more than an equal part of all.

        Raises RolloutFailed on all ranks if sampling or a reward raised on any; RankLost, DeadlineExceeded.
        """
        key = f"rollout/{self._rollouts}"
        self._rollouts += 1
        own, error = {"made": [], "rollout_s": 0.0, "scoring_s": 0.0}, None  # this rank's message
        events = self._drained()
        together = max(1, min(decode // len(slots[0].seeds), math.ceil(len(slots) / self.engine.world)))
        try:
            while stop() is None and (taken := self._take(key, len(slots), together)):
                events += self._complete(taken, slots, options, own, stop)
        except Interrupted:  # in a rollout function
            pass
        except Exception as raised:  # raised below, after the exchange
            error = raised
        if error is not None or stop() is not None:
            self._counter.add(key, _EMPTY)
        for kind, start_s, end_s, label in events:
            self.engine.events.add(kind, start_s, end_s, label=label, microbatch=-1)
        message = own | {"stop": stop(), "failed": None if error is None else _reason(error)}
        messages = self.engine.exchange("exchange the completions", message)
        if self.engine.rank == 0:
            self._counter.delete_key(key)
        failed = {rank: theirs["failed"] for rank, theirs in enumerate(messages) if theirs["failed"] is not None}
        if failed:
            words = "; ".join(f"rank {rank}: {text.partition(TRACEBACK)[0]}" for rank, text in failed.items())
            _, mark, trace = next(iter(failed.values())).partition(TRACEBACK)  # one is enough
            raise RolloutFailed(list(failed), f"a rollout failed ({words}){mark}{trace}") from error
        asked = next((theirs["stop"] for theirs in messages if theirs["stop"] is not None), None)
        return self._joined(slots, messages) if asked is None else asked

    def _take(self, key: str, count: int, together: int) -> range:
        """The places of the next free prompts; empty when all are taken."""
        start = (self._counter.add(key, 1) - 1) * together
        return range(count)[start : start + together]

    def _complete(
        self,
        taken: range,
        slots: list[PromptSlot],
        options: SamplingOptions,
        own: dict[str, Any],
        stop: Callable[[], int | None],
    ) -> list[Span]:
        """Adds the completions of `taken` to `own`, unless asked to stop; returns spans to record."""
        chosen = [slots[place] for place in taken]
        start_s = time.monotonic()
        requests = [Request(ids=slot.prompt.ids, seeds=slot.seeds) for slot in chosen]
        if self._function is None:
            sampled, more = self.completions.generate(requests, options), {}
        else:
            engine = TurnEngine(self.completions, requests, options, self.tokenizer, stop)
            made, more = self._function([slot.prompt.given for slot in chosen for _ in slot.seeds], engine)
            sampled = [[made.pop(0) for _ in slot.seeds] for slot in chosen]
        sampled_s = time.monotonic()
        own["rollout_s"] += sampled_s - start_s
        spans = [*self._drained(), ("rollout", start_s, sampled_s, f"{len(taken)} prompts")]
        if stop() is not None:
            return spans
        flat = [(slot, one) for slot, group in zip(chosen, sampled, strict=True) for one in group]
        scores = self.rewards.score(
            [slot.prompt.given for slot, _ in flat],
            [self._completion(slot, one) for slot, one in flat],
            [one.ids for _, one in flat],
            {name: [slot.prompt.columns.get(name) for slot, _ in flat] for name in self._columns} | more,
        )
        scored_s = time.monotonic()
        own["scoring_s"] += scored_s - sampled_s
        at = 0
        for place, group in zip(taken, sampled, strict=True):
            rewards = [of_function[at : at + len(group)] for of_function in scores]
            at += len(group)
            own["made"].append({"slot": place, "rewards": rewards, "sampled": [_packed(one) for one in group]})
        return [*spans, ("scoring", sampled_s, scored_s, "")]

    def _completion(self, slot: PromptSlot, one: Sampled) -> Any:
        """As reward functions get it: text, or for messages the assistant's message."""
        text = self.tokenizer.decode(one.ids, skip_special_tokens=True)
        return text if isinstance(slot.prompt.given, str) else [{"role": "assistant", "content": text}]

    def _drained(self) -> list[Span]:
        """This rank's waits since the last call; the many forwards of decoding are dropped."""
        drained = self.engine.events.drain()
        return [(each.kind, each.start_s, each.end_s, each.label) for each in drained if each.kind == "wait"]

    def _joined(self, slots: list[PromptSlot], messages: list[dict[str, Any]]) -> Rollout:
        made = {each["slot"]: each for theirs in messages for each in theirs["made"]}
        by_slot = [made[place] for place in range(len(slots))]
        rewards = torch.tensor([each["rewards"] for each in by_slot], dtype=torch.float64).transpose(0, 1)
        return Rollout(
            slots=slots,
            sampled=[[_unpacked(one) for one in each["sampled"]] for each in by_slot],
            rewards=rewards,
            totals=torch.tensor(self.rewards.total(rewards.flatten(1).tolist()), dtype=torch.float64).view(
                rewards.shape[1:]
            ),
            rollout_s=sum(theirs["rollout_s"] for theirs in messages) / len(messages),
            scoring_s=sum(theirs["scoring_s"] for theirs in messages) / len(messages),
        )


_LISTS = {"ids": "<i4", "logps": "<f4", "mask": "i1", "prompt": "<i4"}  # of a completion, with their dtypes


def _packed(one: Sampled) -> dict[str, Any]:
    lists = {name: np.asarray(values, dtype) for name, dtype in _LISTS.items() if (values := getattr(one, name))}
    return {"ended": one.ended} | {name: base64.b64encode(each.tobytes()).decode() for name, each in lists.items()}


def _unpacked(sent: dict[str, Any]) -> Sampled:
    sent = {"ids": "", "logps": ""} | sent
    lists = {name: np.frombuffer(base64.b64decode(sent[name]), _LISTS[name]).tolist() for name in _LISTS.keys() & sent}
    return Sampled(ended=sent["ended"], **lists)


def _reason(error: Exception) -> str:
    """A failed function's own message, or an error with its class."""
    return str(error) if isinstance(error, (RewardFailed, GenerationFailed)) else describe(error)
