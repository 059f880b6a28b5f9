"""The work queue behind waves: whoever takes the whole packs, loss, gradients and steps are those of plain torch."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch

from odc_triton import MinibatchFailed, full_parameters, minibatch
from odc_triton.balance import MinibatchSampler, PackedDataset, QueuedPacks, pack_collate
from odc_triton.hf import summed_loss
from odc_triton.packs.collate import Pack
from odc_triton.plan.entries import Entry
from tests.support import ranks
from tests.support.parity import whole_model_error
from tests.support.splitting import LENGTHS, Setup, gradients, plain, raises_in_forward, samples, sharded

CAP = 24  # samples 0 and 2 are longer, and in a wave each; on 3 ranks sample 1 fills a rank's part of one
STEPS = 3
SETUP = Setup(steps=STEPS)


def begin(rank: int, world: int) -> tuple[torch.nn.Module, Iterator[QueuedPacks]]:
    """A model, and minibatches of all four samples, one an epoch."""
    sampler = MinibatchSampler(LENGTHS, -(-len(LENGTHS) // world), CAP, "queue", rank=rank, world=world, split=True)
    return sharded(SETUP, rank, sampler.split_tokens), itertools.chain.from_iterable(itertools.repeat(sampler))


def late(queued: QueuedPacks, rank: int) -> Iterator[list[Entry]]:
    """The rank's waves; then it is so slow that others take all whole packs."""
    yield from itertools.islice(queued, len(queued.waves[rank]))
    while queued._counter.add(queued._key, 0) < len(queued.packs):
        time.sleep(0.005)
    yield from queued


def step_on(
    model: torch.nn.Module,
    queued: QueuedPacks,
    packs: Iterable[list[Entry]],
    step: int,
    loss_of: Callable[[torch.nn.Module, Pack], torch.Tensor] = summed_loss,
) -> float:
    data, total = PackedDataset(samples(SETUP, step)), 0.0
    targets = sum(LENGTHS[index] - 1 for index in queued.own_part())
    with minibatch(model, tokens=targets, split=queued.split) as mb:
        for pack in packs:
            loss = loss_of(model, *pack_collate([data[pack]])) / mb.tokens
            loss.backward()
            total += loss.item()
    return total


def require_right(found: dict[str, torch.Tensor]) -> None:
    """fp32 sums in another order; biases of keys have a small gradient beside its summands."""
    want = plain(SETUP)[1]
    largest = max(gradient.norm() for gradient in want.values())
    assert found.keys() == want.keys()
    for name, gradient in want.items():
        assert (found[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-8 * largest, name


def _steps(rank: int, world: int, slow: int) -> tuple:
    """Losses by step, the first step's gradients, the weights at the end; whole packs that this rank took."""
    model, minibatches = begin(rank, world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, first, taken = [], {}, 0
    for step, queued in zip(range(STEPS), minibatches, strict=False):
        assert queued.split.waves == 2
        losses.append(step_on(model, queued, late(queued, rank) if rank == slow else queued, step))
        first = first or gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        taken += len(queued.taken)
    return losses, first, dict(full_parameters(model)), taken


def test_as_whole_samples() -> None:
    slow = 2
    outcomes = ranks.run(_steps, 3, slow)
    want_losses, _, want_weights = plain(SETUP)
    for step, loss in enumerate(want_losses):
        assert sum(losses[step] for losses, *_ in outcomes) == pytest.approx(loss, rel=1e-5)
    for _, first, weights, _ in outcomes:
        require_right(first)
        assert whole_model_error(weights, want_weights) <= 1e-4
    assert sum(taken for *_, taken in outcomes) == STEPS
    assert outcomes[slow][-1] == 0


def _fails_once(rank: int, world: int, fault: str) -> str:
    """In rank 1's first wave, or in the sample of 9 tokens, whoever takes it."""
    model, minibatches = begin(rank, world)

    def loss_of(model: torch.nn.Module, pack: Pack) -> torch.Tensor:
        fails = rank == 1 if fault == "segment" else pack["input_ids"].shape[1] == LENGTHS[3]
        return (raises_in_forward if fails else summed_loss)(model, pack)

    said, queued = "nothing", next(minibatches)
    try:
        step_on(model, queued, queued, 0, loss_of)
    except MinibatchFailed as error:
        said = str(error)
    model.zero_grad()
    queued = next(minibatches)
    step_on(model, queued, queued, 0)
    require_right(gradients(model))
    return said


def test_a_microbatch_that_fails() -> None:
    """Every rank hears the cause alone, and the next minibatch has all its packs."""
    of_segment, of_whole = ranks.run_all(3, (_fails_once, "segment"), (_fails_once, "whole"))
    for said in of_segment:
        assert "rank 1: OutOfMemoryError: no memory for 3 GiB" in said
    for said in of_whole:
        assert "OutOfMemoryError: no memory for 3 GiB" in said
    assert not any("PeerFailed" in said for said in of_segment + of_whole)
