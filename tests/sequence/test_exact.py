"""With exact sums, gradients of keys and values are added in the order of the ranks: the same bits in every run."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from odc_triton import enable_split, fully_shard, repeating
from odc_triton.sequence.exchange import Additions, SequenceExchange
from tests.support import ranks, slow
from tests.support.splitting import Dealt, P, Setup, build, step_on

# Three ranks add to what rank 0 has: of two, either order would give the same sum.
DEAL: Dealt = [[[P(0, 0, 10), 3]], [[P(0, 10, 20)], [1]], [[P(0, 20, 30)], [2]], [[P(0, 30, 41)]]]


def _gradients(rank: int, world: int, late: int, backend: str) -> dict[str, torch.Tensor]:
    setup = Setup(backend=backend)
    model = fully_shard(build(setup, replaced=True), backend=backend, exact=True)
    enable_split(model, tokens=48)
    begin_adding = SequenceExchange.begin_adding

    def adds_late(self: SequenceExchange, *given: Any) -> Additions:
        if rank == late:
            time.sleep(0.05)
        return begin_adding(self, *given)

    SequenceExchange.begin_adding = adds_late
    return repeating(lambda: step_on(model, setup, rank, deal=DEAL)[1])


def _with_buffers(rank: int, world: int, in_flight: int, backend: str) -> dict[str, torch.Tensor]:
    setup = Setup(backend=backend, change="checkpointing", sizes=(("num_hidden_layers", 5),))
    model = fully_shard(build(setup, replaced=True), backend=backend, exact=True)
    enable_split(model, tokens=48, layers_in_flight=in_flight)
    return repeating(lambda: step_on(model, setup, rank, deal=DEAL)[1])


@pytest.mark.parametrize("backend", ["cpu", slow("cpu-sharded")])
def test_however_many_layers_have_buffers(backend: str) -> None:
    want, *others = ranks.run_all(4, *((_with_buffers, in_flight, backend) for in_flight in (5, 2, 1)))
    for found in (found for of_ranks in others for found in of_ranks):
        for name, gradient in want[0].items():
            assert torch.equal(found[name], gradient), name


@pytest.mark.parametrize("backend", ["cpu", "cpu-sharded", slow("cpu-interpreter")])
def test_whoever_is_late(backend: str) -> None:
    (want, *_), *others = (ranks.run(_gradients, 4, late, backend) for late in (1, 3))
    for found in (found for of_ranks in others for found in of_ranks):
        for name, gradient in want.items():
            assert torch.equal(found[name], gradient), name
