"""A reference model's forwards on segments, in the policy's minibatch: a rank that fails, dies or stands still there,
or that holds up others there by what it waits for in the policy, is named by all others.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from threading import Thread
from typing import Any

import psutil
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from odc_triton import MinibatchFailed, enable_split, fully_shard
from odc_triton.base.errors import OfRanks
from odc_triton.hf import summed_loss
from odc_triton.packs.reference import Reference
from odc_triton.plan.fields import IGNORED
from odc_triton.sequence.exchange import SequenceExchange
from tests.support import ranks, slow
from tests.support.deadlines import LONG_S
from tests.support.splitting import Dealt, P, Setup, build, step_on

EVERYWHERE: Dealt = [[[P(0, 0, 10)]], [[P(0, 10, 30)]], [[P(0, 30, 41)]]]
TWO: Dealt = [[[P(0, 0, 20)]], [[P(0, 20, 41)]], []]
# Rank 1 needs segments of rank 0 alone, which needs those of rank 2.
CHAIN: Dealt = [[[P(0, 13, 41), P(2, 0, 13)]], [[P(2, 13, 30)]], [[P(0, 0, 13)]]]


def _models() -> tuple[nn.Module, Reference]:
    policy, frozen = (build(Setup(), replaced=True) for _ in range(2))
    models = [fully_shard(each, timeout=LONG_S) for each in (policy, frozen.requires_grad_(False))]
    for each in models:
        enable_split(each, tokens=48)
    return models[0], Reference(models[1], models[0])


def _loss_of(reference: Reference) -> Callable[[nn.Module, dict], torch.Tensor]:
    def loss_of(model: nn.Module, pack: dict) -> torch.Tensor:
        loss = summed_loss(model, pack)
        targets = pack["shift_labels"][0] if "shift_labels" in pack else pack["labels"][0, 1:]
        theirs = F.cross_entropy(reference(pack).float(), targets[targets != IGNORED], reduction="sum")
        assert theirs.item() == pytest.approx(loss.item(), rel=1e-5)  # their weights are the same
        return loss

    return loss_of


def _strikes(exchange: SequenceExchange, layer: int, strike: Callable[[], None]) -> None:
    """Before this rank publishes its rows of that layer."""
    publish = exchange.publish

    def on_publish(at: int, *given: Any, **named: Any) -> None:
        if at == layer:
            strike()
        publish(at, *given, **named)

    exchange.publish = on_publish


def _fails(rank: int, world: int) -> str:
    model, reference = _models()

    def raises() -> None:
        raise torch.OutOfMemoryError("no memory for 3 GiB")

    for step, deal in enumerate((TWO, EVERYWHERE, EVERYWHERE)):
        step_on(model, Setup(), rank, step, _loss_of(reference), deal)
        model.zero_grad()
    if rank == 1:
        _strikes(reference._own, 1, raises)
    with pytest.raises(MinibatchFailed) as caught:
        step_on(model, Setup(), rank, loss_of=_loss_of(reference), deal=EVERYWHERE)
    return str(caught.value)


def test_a_rank_that_fails() -> None:
    for said in ranks.run(_fails, 3):
        assert "rank 1: OutOfMemoryError: no memory for 3 GiB" in said
        assert "PeerFailed" not in said


def _beside_one_that_ends(rank: int, world: int, deal: Dealt, of: str, victim: int, number: int) -> tuple[str, list]:
    model, reference = _models()
    engines = model._odc_engine, reference.model._odc_engine
    exchanges = {"policy": reference._policys, "reference": reference._own}
    process = psutil.Process(engines[0].exchange("processes", {"pid": os.getpid()})[victim]["pid"])

    def end_the_deadline() -> None:
        """Once the victim stands still and all others wait, whatever the machine's speed."""

        def all_wait() -> bool:
            at_exit = [reached > engines[0].barrier.passed for reached in engines[0].barrier._reached.seen()]
            shown = zip(*(each.sync.waits._waits.seen() for each in exchanges.values()), at_exit, strict=True)
            return all(any(own) or at == victim for at, own in enumerate(shown))

        while process.status() != psutil.STATUS_STOPPED or not all_wait():
            time.sleep(0.01)
        time.sleep(0.8 if rank == 0 else 0.4)  # waits that are over are no longer shown; rank 1 finds the cause itself
        for each in engines:
            each.barrier.timeout_s = 0.0

    last = exchanges[of].buffers.layers - 1
    if rank == victim:
        _strikes(exchanges[of], last, lambda: os.kill(os.getpid(), number))
    if number == signal.SIGSTOP:
        Thread(target=end_the_deadline, daemon=True).start()
    with pytest.raises(OfRanks) as caught:
        step_on(model, Setup(), rank, loss_of=_loss_of(reference), deal=deal)
    return f"{type(caught.value).__name__}: {caught.value}", caught.value.ranks


@pytest.mark.parametrize(
    ("deal", "of", "victim", "number"),
    [
        slow(EVERYWHERE, "reference", 1, signal.SIGKILL),
        slow(EVERYWHERE, "reference", 0, signal.SIGKILL),
        slow(EVERYWHERE, "reference", 0, signal.SIGSTOP),
        slow(CHAIN, "policy", 2, signal.SIGKILL),
        (CHAIN, "policy", 2, signal.SIGSTOP),
    ],
)
def test_a_rank_that_ends_or_stands_still_is_named_alone(deal: Dealt, of: str, victim: int, number: int) -> None:
    with ranks.start(_beside_one_that_ends, 3, deal, of, victim, number) as job:
        others = job.wait_for([rank for rank in range(3) if rank != victim])
    assert [each.error for each in others] == [None] * 2
    kind = "RankLost: " if number == signal.SIGKILL else "DeadlineExceeded: "
    for said, blamed in (each.value for each in others):
        assert said.startswith(kind), said
        assert blamed == [victim], said
