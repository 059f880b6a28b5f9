"""Errors between ranks. Wrong arguments raise ValueError, TypeError or RuntimeError as usual."""

from __future__ import annotations

TRACEBACK = "\nTraceback (most recent call last):"
_MOST_CHARACTERS = 4000


def describe(error: BaseException) -> str:
    """An error as text for the other ranks. Leaves out the middle of a long text; copes with a str() that raises."""
    try:
        text = str(error)
    except Exception as raised:
        text = f"(its text can't be made: {type(raised).__name__})"
    if len(text) > _MOST_CHARACTERS:
        half = _MOST_CHARACTERS // 2
        text = f"{text[:half]} … ({len(text) - 2 * half:,} characters left out) … {text[-half:]}"
    return f"{type(error).__name__}: {text}"


def in_a_line(error: BaseException) -> str:
    """An error in one line, for a command's user; a traceback in its text, as of a reward, follows on its own lines.

    Its class is named only where the text needs it (KeyError: 'x').
    """
    spoken = isinstance(error, (ValueError, OSError, RuntimeError, ImportError)) and str(error)
    text, mark, trace = (str(error) if spoken else f"{type(error).__name__}: {error}").partition(TRACEBACK)
    return " ".join(text.split()) + mark + trace


class GenerationFailed(RuntimeError):
    """An engine returned no completions, or did not take the weights; the message has the observation and a remedy."""


class GenerationAborted(GenerationFailed):
    """Another thread has ended the request, as its own failed: that error has the reason."""


class OdcError(RuntimeError):
    """Base of the errors that involve several ranks."""


class OfRanks(OdcError):
    """An error that names the ranks that caused it. Can be pickled, because job schedulers pickle errors."""

    def __init__(self, ranks: list[int], message: str) -> None:
        self.ranks = ranks
        super().__init__(message)

    def __reduce__(self) -> tuple:
        return type(self), (self.ranks, str(self))


class MinibatchFailed(OdcError):
    """Raised on every rank if a microbatch raised on some rank; no step may be taken from this minibatch.

    All ranks leave the minibatch together, so a training loop can catch this and continue with the next minibatch.
    `ranks` maps each rank that failed to its reason.
    """

    def __init__(self, minibatch: int, ranks: dict[int, str]) -> None:
        self.minibatch = minibatch
        self.ranks = ranks
        reasons = "; ".join(f"rank {rank}: {text}" for rank, text in sorted(ranks.items()))
        super().__init__(f"minibatch {minibatch} failed, its gradients are dropped on all ranks ({reasons})")

    def __reduce__(self) -> tuple:
        return type(self), (self.minibatch, self.ranks)


class MinibatchToRepeat(MinibatchFailed):
    """Exact sums of some parameters did not fit their scales, which have been adapted: run the same packs once more.

    `parameters`: reasons by name. A model's first minibatch usually needs it once, as its scales are guesses.
    """

    def __init__(self, minibatch: int, parameters: dict[str, str]) -> None:
        self.minibatch, self.parameters, self.ranks = minibatch, parameters, {}
        name, why = next(iter(parameters.items()))
        more = f", and {len(parameters) - 1} more" if len(parameters) > 1 else ""
        OdcError.__init__(
            self,
            f"minibatch {minibatch} must be run again on all ranks, its gradients are dropped: the scales of exact "
            f"sums have been adapted ({name}: {why}{more})",
        )

    def __reduce__(self) -> tuple:
        return type(self), (self.minibatch, self.parameters)


class PeerFailed(OfRanks):
    """A rank waited for results that these ranks can no longer compute in this minibatch: they are the cause."""


class RankLost(OfRanks):
    """A peer's process is gone. Start a new job from the last checkpoint."""


class DeadlineExceeded(OfRanks, TimeoutError):
    """A live peer did not respond within the timeout."""


class RolloutFailed(OfRanks):
    """Raised on every rank if sampling or scoring raised on some: no step is taken."""


class RolloutStopped(OdcError):
    """Raised on every rank if some was asked to stop before all completions were there: no step is taken."""

    def __init__(self, signal: int) -> None:
        self.signal = signal
        super().__init__(f"stopped by signal {signal} before all completions were sampled")

    def __reduce__(self) -> tuple:
        return type(self), (self.signal,)


class RanksDiffer(OdcError, ValueError):
    """The ranks have different models or options; the message names the first difference."""


class PolicyUnavailable(OdcError):
    """The policy of a running job can't be read: nothing offers it, the job ended, or the job dropped this reader."""


class CheckpointFailed(OfRanks):
    """Raised on every rank if some could not write or read a checkpoint. Older checkpoints are unchanged."""


class CheckpointCorrupt(OdcError, ValueError):
    """A checkpoint's files were truncated, changed or removed; the message names one."""


class CheckpointDiffers(OdcError, ValueError):
    """A checkpoint belongs to another model or optimizer; nothing was overwritten."""
