"""What ranks tell each other at the entry of a minibatch, and what must be the same on all of them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..base.errors import RanksDiffer
from .optimizer_watch import Hyperparameters
from .sharded import Sharded


def checked_tokens(tokens: Any) -> int | None:
    """`tokens` as an int: any integer of at least 0, from Python, numpy or a tensor of one element."""
    if tokens is None:
        return None
    try:
        count = -1 if isinstance(tokens, bool) else operator.index(tokens)
    except TypeError:
        count = -1
    if count < 0:
        raise ValueError(f"tokens is {tokens!r}; give this rank's number of target tokens, an int of at least 0")
    return count


def trained_mask(parameters: Iterable[Sharded]) -> str:
    """Which of the parameters require a gradient now, one bit each, in hexadecimal."""
    bits = "".join(str(int(each.requires_grad)) for parameter in parameters for each in parameter.optimized)
    return f"{int(bits or '0', 2):x}"


def _compare_trained(masks: Sequence[str], parameters: Iterable[Sharded]) -> None:
    if len(set(masks)) < 2:
        return
    names = [parameter.name for parameter in parameters for _ in parameter.optimized]
    for bits in zip(names, *(f"{int(mask, 16):0{len(names)}b}" for mask in masks), strict=True):
        if len(set(bits[1:])) > 1:
            frozen = [rank for rank, bit in enumerate(bits[1:]) if bit == "0"]
            raise RanksDiffer(
                f"{bits[0]} is frozen on ranks {frozen} only, so its gradient would be the other ranks' part: call "
                f"requires_grad_() with the same value on all ranks"
            )


def compare_entries(
    messages: Sequence[dict[str, Any]],
    parameters: Sequence[Sharded],
    hyperparameters: Hyperparameters,
    exchange: Callable[[str, dict[str, Any]], list[dict[str, Any]]],
) -> int | None:
    """The tokens of all ranks, None where none were given. `messages`: of all ranks, with "tokens", "split",
    "scales", "trained" and "stepped"; `exchange`: with all ranks, of the steps, to find the first difference.

    Raises RanksDiffer, on all ranks.
    """
    given = [theirs["tokens"] for theirs in messages]
    missing = [rank for rank, count in enumerate(given) if count is None]
    if missing and len(missing) < len(given):
        raise RanksDiffer(f"tokens was given on some ranks but not on ranks {missing}; give it on all or on none")
    if len(plans := {theirs["split"] for theirs in messages}) > 1:
        by_rank = ", ".join(f"{theirs['split'] or 'none'} on rank {rank}" for rank, theirs in enumerate(messages))
        raise RanksDiffer(
            f"the ranks split sequences by {len(plans)} different plans ({by_rank}): give all ranks' minibatch() the "
            f"split of one sampler, with the same lengths, seed, cost and limits"
        )
    if len({theirs["scales"] for theirs in messages}) > 1:
        raise RanksDiffer("the scales of exact sums are not the same on all ranks: load one checkpoint on all of them")
    _compare_trained([theirs["trained"] for theirs in messages], parameters)
    hyperparameters.compare([theirs["stepped"] for theirs in messages], exchange)
    return None if missing else sum(given)
