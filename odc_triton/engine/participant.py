"""A feature's part in the minibatch protocol: what it sends at the barriers, and what follows from all messages."""

from __future__ import annotations

from typing import Any


class Participant:
    """Its hooks, in the order in which `Protocol` calls them:

        entry  (barrier)  entered  opened  (microbatches)  leave  exit  (barrier)  settle  (reduction)  reduced

    By default a hook does nothing. `name`: of its messages, and of the argument of `minibatch` that it takes, if any.
    Messages are JSON. A hook that gets the messages of all ranks raises on all of them or on none.
    """

    name: str

    def entry(self, given: Any) -> Any:
        """Before the entry barrier; returns this rank's message. `given`: its argument of `minibatch`, None if there
        was none. Raises to keep all ranks out of the minibatch.
        """

    def entered(self, messages: list[Any]) -> None:
        """All ranks passed the entry barrier. Raises if they must not open the minibatch."""

    def opened(self) -> None:
        """The minibatch is open."""

    def leave(self) -> None:
        """This rank's microbatches are over. Raises to fail the minibatch, which fails it on all ranks."""

    def failed(self) -> None:
        """The minibatch failed on this rank: peers must not wait for it until the exit."""

    def exit(self) -> Any:
        """Before the exit barrier, when this rank's device is idle; returns this rank's message."""

    def settle(self, messages: list[Any] | None) -> None:
        """All ranks passed the exit barrier; None if the minibatch failed on one of them. Raises if the gradients
        can't be used.
        """

    def reduced(self) -> None:
        """`p.grad` is set."""

    # ---- checkpoints

    saved_as: str | None = None
    """The key of its state in a checkpoint, which begins with "odc_"; None if it has none."""

    def state(self) -> Any:
        """To be saved, as JSON: the same on all ranks."""

    def restore(self, state: Any) -> None:
        """Continues from a saved state, on all ranks."""


class StepPart:
    """A feature's part in the barrier of a training loop's step. `name`: of its reports."""

    name: str

    def report(self) -> Any:
        """Returns this rank's report, as JSON."""

    def settle(self, reports: list[Any]) -> None:
        """Takes all ranks' reports, by rank. Must decide the same on all of them."""
