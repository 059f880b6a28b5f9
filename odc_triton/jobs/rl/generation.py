"""The interface of engines that sample completions: transformers in this process, or vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt, sampled `len(seeds)` times."""

    ids: list[int]  # the prompt's tokens
    seeds: list[int]  # of each completion, 63 bits: a function of (seed, step, prompt, generation)


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """One completion."""

    ids: list[int]  # with the end token, if it ended
    logps: list[float]  # of each of `ids` under the sampled distribution (after temperature); NaN if unknown
    ended: bool  # by an end token; else at max_new_tokens, or by a rollout function
    mask: list[int] | None = None  # of each of `ids`, 0: from outside, such as a tool's output; None: all are sampled
    prompt: list[int] | None = None  # the tokens before them, if not the request's

    @property
    def own(self) -> list[int]:
        """1 for each of `ids` that was sampled, 0 for others."""
        return self.mask or [1] * len(self.ids)


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Options of sampling, always from the whole vocabulary."""

    temperature: float  # 0: greedy
    max_new_tokens: int
    end_tokens: tuple[int, ...]


class CompletionEngine(Protocol):
    """Samples completions of a rank's prompts. Every rank has one."""

    samples_elsewhere: bool  # other weights or kernels than the policy's: the importance ratio must be corrected
    samples_remotely: bool  # in another process, for any thread of this one

    def generate(self, requests: Sequence[Request], options: SamplingOptions) -> list[list[Sampled]]:
        """[request][seed]. Not collective."""
        ...

    def sync(self, model: nn.Module) -> None:
        """Loads the policy's current weights, before a rollout. Every rank calls it, outside a minibatch."""
        ...

    def abort(self) -> None:
        """Ends what other threads have asked for, which raises there; nothing where it does not sample remotely."""

    def close(self) -> None:
        """Frees the engine's resources."""
        ...


def end_tokens_of(model: nn.Module, tokenizer: Any) -> tuple[int, ...]:
    """The tokens at which a completion ends: the model's, and the tokenizer's, which has one."""
    named = getattr(model.generation_config, "eos_token_id", None)
    named = [*named] if isinstance(named, (list, tuple)) else [named]
    return tuple(sorted({token for token in (*named, tokenizer.eos_token_id) if token is not None}))
