"""Which segments a rank has computed, layer by layer. Calls that would let other ranks wait for ever are refused."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import torch

from ..plan.entries import Segment
from ..plan.segments import PlannedSegment


class SegmentState(Enum):
    """Of a segment in a layer."""

    PENDING = 0  # its forward has not run
    FORWARD = 1  # its forward ran, and nothing follows
    NO_GRAD = 2  # its forward ran without gradients: perhaps a checkpoint, whose backward runs it again
    BACKWARD = 3  # its backward must follow
    DONE = 4  # its backward ran


class PlanProgress:
    """Of a plan, of which a rank has the segments `own`. `numbers`: of the layers, in the model."""

    def __init__(self, own: Sequence[PlannedSegment], numbers: Sequence[int], *, forward_only: bool = False) -> None:
        self._own, self._numbers, self._forward_only = own, numbers, forward_only
        self._states = {planned.segment: [SegmentState.PENDING] * len(numbers) for planned in own}

    def start(self, layer: int, segments: Sequence[Segment], wave: int, *, trains: bool) -> None:
        """The forward of the segments of one microbatch; `trains`: their keys or values need gradients.

        Raises RuntimeError where other ranks would wait for ever, or read what changes under them.
        """
        for segment in segments:
            if self._states[segment][layer] is not SegmentState.PENDING:
                raise RuntimeError(
                    f"{segment} were computed before, and other ranks may have read them: run a pack with segments "
                    f"once in a minibatch; forwards without gradients go before or after it, into split_forward"
                )
        if layer == 0:  # rules 1 and 2 of [Note: waves]
            self.require_before(wave)
            for planned in self._own:
                if (planned.wave == wave) != (planned.segment in segments):
                    names = f"{planned.segment} and {segments[0]}"
                    raise RuntimeError(f"{names} are not in the packs that the plan has them in")
        if self._forward_only or (torch.is_grad_enabled() and not trains):
            state = SegmentState.FORWARD
        else:
            state = SegmentState.BACKWARD if torch.is_grad_enabled() else SegmentState.NO_GRAD
        for segment in segments:
            self._states[segment][layer] = state

    def require_before(self, wave: int) -> None:
        """Raises RuntimeError if segments of an earlier wave are missing."""
        for planned in self._own:
            if planned.wave >= wave:
                continue
            states = self._states[planned.segment]
            if SegmentState.PENDING in states:
                raise RuntimeError(
                    f"{planned.segment} were not computed, and other ranks need them: run every pack of the minibatch, "
                    f"in their order"
                )
            of_layers = zip(self._numbers, states, strict=True)
            layers = [*dict.fromkeys(number for number, state in of_layers if state is SegmentState.BACKWARD)]
            if layers or (SegmentState.NO_GRAD in states and SegmentState.DONE not in states):
                where = f" in layers {layers}" if 0 < len(layers) < len({*self._numbers}) else ""
                raise RuntimeError(
                    f"{planned.segment} had no backward{where}, and other ranks wait for it: call backward for each "
                    f"pack before the next one's forward, on a loss that depends on all layers, also for a pack "
                    f"without targets (0 * logits.sum() does)"
                )

    def require_first(self, layer: int, segments: Sequence[Segment]) -> None:
        """Other ranks wait for one addition: a later one would be lost, or stay for the next minibatch."""
        for segment in segments:
            if self.is_done(layer, segment):
                raise RuntimeError(
                    f"{segment} had a backward already, and other ranks have taken their gradients from it: call "
                    f"backward once for a pack with segments, on the sum of its losses"
                )

    def is_done(self, layer: int, segment: Segment) -> bool:
        return self._states[segment][layer] is SegmentState.DONE

    def end(self, layer: int, segment: Segment) -> None:
        """Its backward has run."""
        self._states[segment][layer] = SegmentState.DONE
