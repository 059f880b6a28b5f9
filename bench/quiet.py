"""Whether the machine was quiet while something was timed: how long ranks waited for a core that others had.

[Note: what counts as disturbed] The kernel counts, for each thread, the time in which it could run and had no core
(the second field of schedstat). Here it is that of the thread that computes, forward and backward. Threads of gloo
contend with it by design: counted too, they add 8% to FSDP2's share where nobody else runs.

Two ranks on two cores, the computing threads' share of a minibatch's time, largest of both ranks, by variant:

    nobody else runs                        0.2% to 4%, seldom 5%
    another process has 10% of a core       1% to 8%
    another process has a core              13% to 41%, minibatches take 1.2 to 1.7 times as long

So `MOST_WAITING` lets through what variants do to themselves, and what moves a ratio by a few percent at most.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

MOST_WAITING = 0.05
MOST_REPEATS = 2  # of one minibatch
REPEATED_SHARE = 0.25  # of a run's minibatches: the most turns that are repeated


def waited_s() -> float:
    """Seconds for which the calling thread has waited for a core; nan where the kernel does not tell."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return math.nan


def share(seconds: float, waited: Sequence[float]) -> float:
    """Of `seconds`, the share for which the rank waited that waited most; nan where it isn't known."""
    return max(waited) / seconds


def is_disturbed(seconds: float, waited: Sequence[float]) -> bool:
    """Whether any rank's waiting, in seconds, is more than a small share of `seconds`. Not where it isn't known."""
    return share(seconds, waited) > MOST_WAITING


def disturbed(turns: Iterable[Iterable[tuple[float, Sequence[float]]]], *, measured_anew: int = 0) -> dict[str, Any]:
    """Of turns, each with seconds and ranks' waiting of all ways: how many were measured again, and in how many that
    of some way is disturbed even so; None where the kernel does not tell.
    """
    found = [[*turn] for turn in turns]
    left = sum(any(is_disturbed(*way) for way in turn) for turn in found)
    is_known = not any(math.isnan(each) for turn in found for _, waited in turn for each in waited)
    return {"measured_anew": measured_anew, "left": left if is_known else None}


def most_repeats(minibatches: int) -> int:
    """How many turns a run of so many may repeat."""
    return math.ceil(REPEATED_SHARE * minibatches)


def in_words(disturbed: dict[str, int | None], minibatches: int) -> str:
    """One sentence about `disturbed` of so many minibatches."""
    again, left = disturbed["measured_anew"], disturbed["left"]
    if left is None:
        return "Whether the machine was quiet is not known: its kernel does not tell how long ranks waited for a core."
    limit = f"a rank waited for a core for over {MOST_WAITING:.0%} of the time"
    if left:
        after = f", after {again} were measured again" if again else ""
        return (
            f"The machine was not quiet: in {left} of {minibatches} minibatches {limit}{after}. Run it again on a "
            f"quiet machine."
        )
    if again:
        return f"{again} of {minibatches} minibatches were measured again, as {limit}; none of those that count is."
    return f"The machine was quiet: in none of {minibatches} minibatches {limit}."
