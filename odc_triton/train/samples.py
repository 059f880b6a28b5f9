"""Sample generations of `train sft`: at an evaluation the sharded model completes held-out prompts, greedily."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from torch import nn

from ..data.records import IGNORED
from ..engine.api import engine_of
from ..hf.enable import innermost
from ..hf.images import prompt_inputs
from ..rl.generation import Request, SamplingOptions, end_tokens_of
from ..rl.transformers_engine import TransformersEngine
from .run import Sample

_TEXT_TOKENS = 32  # of a text, which has no prompt, at most; at most half of it
_TOGETHER = 16  # samples that a rank decodes at a time


_Encoded = Sequence[dict[str, np.ndarray]]  # records with `input_ids` and `labels`


@dataclass(frozen=True, kw_only=True)
class Prompted:
    """A held-out record: prompt and reference continuation, in tokens."""

    prompt: list[int]
    expected: list[int]
    sample: Mapping[str, Any]  # with its pictures


def prompted(data: _Encoded, *, most_tokens: int) -> Iterator[Prompted]:
    """The records of `data`, cut before the last learned span: a completion, or the last turn of the assistant.

    All of a text is learned, so it is cut after its first half, or after 32 tokens if that is less. Records whose
    prompt has more than `most_tokens` tokens, or that have a picture after it, are left out.
    """
    for index in range(len(data)):
        sample = data[index]
        ids, labels = sample["input_ids"], sample["labels"]
        learned = np.flatnonzero(labels != IGNORED)
        breaks = np.flatnonzero(np.diff(learned) > 1)
        start, end = int(learned[breaks[-1] + 1 if len(breaks) else 0]), int(learned[-1]) + 1
        if start == 0:
            start = max(min(len(ids) // 2, _TEXT_TOKENS), 1)
        types = sample.get("mm_token_type_ids", labels[:0])
        if start <= most_tokens and not types[start:].any():
            yield Prompted(prompt=ids[:start].tolist(), expected=ids[start:end].tolist(), sample=sample)


class Completions:
    """Completes the first `count` records of `data` whose prompt fits, each rank a part of them.

    `most_tokens`: of a prompt with its completion, which has at most `new_tokens`. `should_stop` is called about twice
    a second and may raise.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        data: _Encoded,
        *,
        count: int,
        new_tokens: int,
        most_tokens: int,
        should_stop: Callable[[], None],
    ) -> None:
        places = getattr(model.config.get_text_config(), "max_position_embeddings", None) or most_tokens
        most_of_prompt = min(most_tokens, places) - new_tokens
        if most_of_prompt < 1:
            raise ValueError(
                f"--eval-sample-tokens is {new_tokens} and the model takes {places} tokens (max_position_embeddings): "
                f"no prompt fits; give fewer --eval-sample-tokens"
            )
        self._engine, self._model, self._tokenizer = engine_of(model), model, tokenizer
        self._chosen = [each for each, _ in zip(prompted(data, most_tokens=most_of_prompt), range(count), strict=False)]
        self._completions = TransformersEngine(model, should_stop=lambda: bool(should_stop()))
        self._options = SamplingOptions(
            temperature=0.0, max_new_tokens=new_tokens, end_tokens=end_tokens_of(model, tokenizer)
        )
        if len(self._chosen) < count and self._engine.rank == 0:
            print(f"{len(self._chosen)} samples, not {count}: no more have a prompt of at most {most_of_prompt} tokens")

    def sample(self) -> list[Sample]:
        """The samples, the same on every rank, in the order of the records. Collective: one barrier at the end."""
        engine = self._engine
        own = self._chosen[engine.rank :: engine.world]
        made: list[Sample] = []
        for part in _together(own):
            inputs = prompt_inputs(innermost(self._model), part[0].sample, len(part[0].prompt))
            requests = [Request(ids=each.prompt, seeds=[0]) for each in part]
            answers = self._completions.generate(requests, self._options, inputs)
            for each, (answer,) in zip(part, answers, strict=True):
                made.append(
                    {
                        "prompt": self._decoded(each.prompt),
                        "completion": self._decoded(answer.ids),
                        "expected": self._decoded(each.expected),
                        "ended": answer.ended,
                    }
                )
        of_ranks = [each["samples"] for each in engine.exchange("exchange the samples", {"samples": made})]
        return [of_ranks[place % engine.world][place // engine.world] for place in range(len(self._chosen))]

    def _decoded(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)


def _together(prompts: Sequence[Prompted]) -> Iterator[Sequence[Prompted]]:
    """In order, those that are decoded at a time: several, or one with pictures."""
    for sees, group in groupby(prompts, lambda each: "pixel_values" in each.sample):
        part = list(group)
        most = 1 if sees else _TOGETHER
        yield from (part[at : at + most] for at in range(0, len(part), most))
