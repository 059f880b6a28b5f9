"""Models that are read inside of another one's minibatches and never stepped: a reference, a teacher."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ..engine.api import engine_of
from ..engine.minibatch import Participant
from ..nn.head import FusedLogits, divergence
from ..sequence.exchange import SequenceExchange
from .loss import frozen_logits


class Reference(Participant):
    """A sharded model that is never stepped, called with a pack after the forward of the one that is, `policy`.

    If `enable_split` was called on both models, its ranks read segments by the policy's plan. In each wave they run the
    policy's forward, this model's, and the backward, so no rank waits in a circle. After a minibatch that failed, the
    next would fail too.

    model: is sharded over the same ranks.
    policy: the model that trains.
    """

    name = "reference"

    def __init__(self, model: nn.Module, policy: nn.Module) -> None:
        self.model, self._engine = model, engine_of(model)
        engines = engine_of(policy), self._engine
        self._policys, self._own = (each.participant(SequenceExchange) for each in engines)
        if self._own is None:
            return
        engines[0].register(self)
        # A rank that waits for a segment of one model may hold up segments of the other.
        policys = engines[0].barrier.blocked_on
        policys.append(self._own.sync.waits.blocked_on)
        self._engine.barrier.blocked_on = policys  # no list of a former policy, which would keep that alive

    def __call__(self, pack: Mapping[str, object]) -> Tensor | FusedLogits:
        """Logits [n, V] that predict the pack's n targets."""
        self._follow()
        return frozen_logits(self.model, pack)

    def _follow(self) -> None:
        """Opens the policy's plan, which may come late in a minibatch."""
        plan = None if self._policys is None else self._policys.plan
        if self._own is not None and self._own.plan is None and plan is not None:
            self._own.begin(plan, forward_only=True)

    def leave(self) -> None:
        self._follow()  # on ranks without packs too
        if self._own is not None:
            self._own.leave()

    def failed(self) -> None:
        if self._own is not None:
            self._own.failed()

    def exit(self) -> None:
        self._engine.drain("the reference model's forwards")  # raises if a wait of the device timed out

    def settle(self, messages: list[None] | None) -> None:
        if self._own is not None:
            self._own.settle(messages)


class AdapterReference:
    """A PEFT model without its adapters, as a reference of itself, which takes no memory of its own.

    policy: the model that trains.
    """

    def __init__(self, policy: nn.Module) -> None:
        self._policy: Any = policy

    def __call__(self, pack: Mapping[str, object]) -> Tensor | FusedLogits:
        """As Reference."""
        with self._policy.disable_adapter():
            return frozen_logits(self._policy, pack)


class Teacher(Reference):
    """A reference from whose whole distribution the model learns, as in TRL's `generalized_jsd_loss`.

    model, policy: as of `Reference`.
    beta: 0 for KL(teacher || model), 1 for KL(model || teacher), between them Jensen-Shannon.
    temperature: divides both models' logits.
    weight: of the divergence in the loss, the rest of which, `1 - weight`, is the job's own.
    """

    name = "teacher"

    def __init__(self, model: nn.Module, policy: nn.Module, *, beta: float, temperature: float, weight: float) -> None:
        super().__init__(model, policy)
        self.weight, self._how = weight, {"beta": beta, "temperature": temperature}

    def divergence(self, logits: Tensor | FusedLogits, pack: Mapping[str, object]) -> Tensor:
        """[n], in fp32, between the distributions of the pack's n targets. `logits`: the model's, [n, V]."""
        return divergence(logits, self(pack), **self._how)
