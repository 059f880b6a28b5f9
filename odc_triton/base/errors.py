"""What can go wrong between ranks. Wrong arguments raise ValueError, TypeError or RuntimeError as usual."""

from __future__ import annotations

_MOST_CHARACTERS = 4000


def describe(error: BaseException) -> str:
    """An error as the other ranks are told of it: a long text without its middle, one that can't be made not at all."""
    try:
        text = str(error)
    except Exception as raised:
        text = f"(its text can't be made: {type(raised).__name__})"
    if len(text) > _MOST_CHARACTERS:
        half = _MOST_CHARACTERS // 2
        text = f"{text[:half]} … ({len(text) - 2 * half:,} characters left out) … {text[-half:]}"
    return f"{type(error).__name__}: {text}"


class OdcError(RuntimeError):
    """Base of the errors that come from the ranks' work together."""


class OfRanks(OdcError):
    """An error that names the ranks that caused it. Can be pickled, as job schedulers do with errors."""

    def __init__(self, ranks: list[int], message: str) -> None:
        self.ranks = ranks
        super().__init__(message)

    def __reduce__(self) -> tuple:
        return type(self), (self.ranks, str(self))


class MinibatchFailed(OdcError):
    """A microbatch raised on some rank: raised on every rank; no step may be taken from this minibatch.

    All ranks leave the minibatch together, so catching this and going on with the next minibatch works.
    `ranks` maps each rank that failed to its reason.
    """

    def __init__(self, minibatch: int, ranks: dict[int, str]) -> None:
        self.minibatch = minibatch
        self.ranks = ranks
        reasons = "; ".join(f"rank {rank}: {text}" for rank, text in sorted(ranks.items()))
        super().__init__(f"minibatch {minibatch} failed, its gradients are dropped on all ranks ({reasons})")

    def __reduce__(self) -> tuple:
        return type(self), (self.minibatch, self.ranks)


class RankLost(OfRanks):
    """A peer's process is gone. Training goes on from the last checkpoint, in a new job."""


class DeadlineExceeded(OfRanks, TimeoutError):
    """A peer lives but did not do in time what this rank waited for."""


class RanksDiffer(OdcError, ValueError):
    """The ranks called with different models or options; the message names the first difference."""


class CheckpointFailed(OfRanks):
    """A checkpoint could not be written or read, on these ranks: raised on every rank. Older ones are as they were."""


class CheckpointCorrupt(OdcError, ValueError):
    """A checkpoint's files are not what was written: truncated, changed or missing; the message names the file."""


class CheckpointDiffers(OdcError, ValueError):
    """A checkpoint is of another model or optimizer than it is to be loaded into; nothing was overwritten."""
