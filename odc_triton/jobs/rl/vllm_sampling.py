"""Shared by both vLLM engines: a request's parameters, and the check of its answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ...base.errors import GenerationFailed
from .generation import Sampled, SamplingOptions


def parameters(options: SamplingOptions, seed: int) -> dict[str, Any]:
    """vLLM's sampling parameters. All that truncate the distribution are set, as vLLM's defaults come from the model's
    generation config; and only the job's end tokens end a completion."""
    return {
        "n": 1,
        "seed": seed,
        "temperature": options.temperature,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "max_tokens": options.max_new_tokens,
        "stop_token_ids": list(options.end_tokens),
        "ignore_eos": True,
        "logprobs": 0,  # of the sampled token alone
    }


def sampled(ids: Sequence[int], logps: Sequence[float | None], reason: str | None, options: SamplingOptions) -> Sampled:
    """A completion as vLLM returned it. Raises GenerationFailed for one that these parameters can't produce."""
    fits = 0 < len(ids) <= options.max_new_tokens and len(logps) == len(ids)
    fits = fits and all(type(each) is int and each >= 0 for each in ids)
    ends = [each in options.end_tokens for each in ids]
    if not fits or any(ends[:-1]) or reason not in ("stop" if ends[-1] else "length", "length"):
        raise GenerationFailed(
            f"vLLM returned {len(ids)} tokens of at most {options.max_new_tokens}, with {len(logps)} "
            f"log-probabilities, ended by {reason!r} at {list(ids)[-1:]}, where only {list(options.end_tokens)} end a "
            f"completion: is this version supported, and the model the policy's?"
        )
    known = [math.nan if each is None else float(each) for each in logps]
    return Sampled(ids=list(ids), logps=known, ended=ids[-1] in options.end_tokens)
