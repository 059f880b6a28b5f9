"""Forwards of segments without gradients, outside of a minibatch: the losses of unsplit samples."""

from __future__ import annotations

import pytest
import torch

from odc_triton import minibatch, split_forward
from odc_triton.balance import pack_collate
from odc_triton.hf import summed_loss
from odc_triton.plan.segments import SplitPlan
from tests.support import ranks
from tests.support.refusals import caught
from tests.support.splitting import DEALS, Setup, build, packs_of, samples, sharded, step_on


def _evaluate(rank: int, world: int, setup: Setup) -> tuple[list[float], dict[str, str]]:
    """This rank's losses before and after a step; what wrong calls said."""
    model = sharded(setup, rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    packs, losses, said = packs_of(setup, rank), [], {}
    for _ in range(2):
        with torch.no_grad(), split_forward(model, packs.split):
            losses.append(sum(summed_loss(model, pack).item() for pack in packs))
        step_on(model, setup, rank)
        optimizer.step()
        optimizer.zero_grad()

    def enter(split: SplitPlan, fails: bool = False) -> None:
        with torch.no_grad(), split_forward(model, split):
            for pack in packs:
                if fails and rank == 0:
                    raise ValueError("no luck")
                summed_loss(model, pack)

    def inside() -> None:
        with minibatch(model, tokens=1):
            enter(packs.split)

    said["plans differ"] = caught(lambda: enter(packs.split if rank else SplitPlan.of(DEALS["one token first"])))
    said["a plan of others on rank 0"] = caught(lambda: enter(packs.split if rank else SplitPlan.of(DEALS["zigzag"])))
    said["with gradients"] = caught(lambda: split_forward(model, packs.split).__enter__())
    said["another rank fails"] = caught(lambda: enter(packs.split, fails=True))
    said["in a minibatch"] = caught(inside)
    with torch.no_grad():
        said["without it"] = caught(lambda: summed_loss(model, packs[0]))
    with torch.no_grad(), split_forward(model, packs.split):  # all is well again
        losses.append(sum(summed_loss(model, pack).item() for pack in packs))
    return losses, said


def test_losses_of_whole_samples_and_wrong_calls() -> None:
    setup = Setup(deal="two", family="Mistral")
    outcomes = ranks.run(_evaluate, 2, setup)
    model = build(setup, replaced=False)
    with torch.no_grad():
        want = sum(summed_loss(model, pack).item() for pack in pack_collate([[each] for each in samples(setup)]))
    first, second, last = (sum(losses[at] for losses, _ in outcomes) for at in range(3))
    assert first == pytest.approx(want, rel=1e-5)
    assert second < first
    assert last < second
    (_, one), (_, other) = outcomes
    for said in (one, other):
        assert said["plans differ"].startswith("RanksDiffer: the ranks split sequences by 2 different plans")
        assert said["with gradients"].startswith("RuntimeError: split_forward is for forwards without gradients")
        assert "split_forward inside a minibatch" in said["in a minibatch"]
        assert "If other packs have them, give the plan" in said["without it"]
    assert one["a plan of others on rank 0"].startswith("ValueError: the plan is of 3 ranks")
    assert other["a plan of others on rank 0"].startswith(
        "PeerFailed: rank 0 can't enter split_forward: ValueError: the"
    )
    assert one["another rank fails"] == "ValueError: no luck"
    waited = "rank 1 waited for keys and values of tokens 0..23 of sample 0 in layer 0"
    assert other["another rank fails"].startswith(f"PeerFailed: {waited}, and rank 0 failed")


def test_the_device_has_ended_when_forwards_begin_and_when_they_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ODC_SIMULATED_STREAMS", "late")
    model = sharded(Setup(backend="cpu-sharded"), rank=0)
    device, done = model._odc_engine.streams.first.device, []
    device.enqueue(device.current(), lambda: done.append("before"))
    with torch.no_grad(), split_forward(model, None):
        assert done == ["before"]
        device.enqueue(device.current(), lambda: done.append("within"))
    assert done == ["before", "within"]
