"""With exact sums, gradients of keys and values are added in the order of the ranks: the same bits in every run."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from odc_triton import enable_split, fully_shard, repeating
from odc_triton.sequence.exchange import Additions, SequenceExchange
from tests.support import ranks, slow
from tests.support.replicas import mesh_of
from tests.support.splitting import Dealt, P, Setup, build, step_on

# Three ranks add to what rank 0 has: of two, either order would give the same sum.
DEAL: Dealt = [[[P(0, 0, 10), 3]], [[P(0, 10, 20)], [1]], [[P(0, 20, 30)], [2]], [[P(0, 30, 41)]]]


def exact_gradients(
    rank: int, world: int, setup: Setup, deal: Dealt, *, late: int | None = None
) -> dict[str, torch.Tensor]:
    """Of a minibatch in which rank `late` adds after the others."""
    mesh = mesh_of((setup.replicas, world // setup.replicas)) if setup.replicas > 1 else None
    model = fully_shard(build(setup, replaced=True), mesh=mesh, backend=setup.backend, exact=True)
    enable_split(model, tokens=48, layers_in_flight=setup.in_flight)
    begin_adding = SequenceExchange.begin_adding

    def adds_late(self: SequenceExchange, *given: Any) -> Additions:
        if rank == late:
            time.sleep(0.05)
        return begin_adding(self, *given)

    with mock.patch.object(SequenceExchange, "begin_adding", adds_late):
        return repeating(lambda: step_on(model, setup, rank, deal=deal)[1])


def assert_same_bits(*of_launches: list[dict[str, torch.Tensor]]) -> None:
    want, *others = (found for of_ranks in of_launches for found in of_ranks)
    for found in others:
        for name, gradient in want.items():
            assert torch.equal(found[name], gradient), name


@pytest.mark.parametrize(("backend", "in_flights"), [("cpu", (5, 1)), slow("cpu-sharded", (5, 2, 1))])
def test_however_many_layers_have_buffers(backend: str, in_flights: tuple[int, ...]) -> None:
    setup = Setup(backend=backend, change="checkpointing", sizes=(("num_hidden_layers", 5),))
    calls = ((exact_gradients, replace(setup, in_flight=in_flight), DEAL) for in_flight in in_flights)
    assert_same_bits(*ranks.run_all(4, *calls))
