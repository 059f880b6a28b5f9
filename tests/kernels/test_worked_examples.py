"""The numbers in the launchers' docstrings, of two ranks, are what the kernels give."""

from __future__ import annotations

import math

import pytest
import torch

from odc_kernels.embedding import embedding, embedding_grad
from odc_kernels.gather import gather
from odc_kernels.linear import linear, linear_dx
from odc_kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_grad
from odc_kernels.linear_divergence import HeadInput, linear_divergence, linear_divergence_grad
from odc_kernels.peers import ALL, PeerShards
from odc_kernels.scatter import scatter
from odc_kernels.wgrad import wgrad
from tests.support import place

pytestmark = place.MARKS


def shards(*rows: list[list[float]]) -> list[torch.Tensor]:
    return [torch.tensor(each, dtype=torch.float32) for each in rows]


def of(each: list[torch.Tensor], rank: int) -> PeerShards:
    return PeerShards.of(each, shape=(sum(map(len, each)), each[0].shape[1]), rank=rank, near=ALL)


def zeros(columns: int) -> list[torch.Tensor]:
    return [torch.zeros(2, columns), torch.zeros(1, columns)]


@pytest.mark.parametrize("rank", [0, 1])
def test_gather(rank: int) -> None:
    out = torch.full((3, 1), torch.nan)
    gather(peers=of(shards([[1], [2]], [[3]]), rank), out=out)
    assert out.tolist() == [[1], [2], [3]]


def test_scatter() -> None:
    peers = zeros(1)
    for rank, factor in ((0, 1.0), (1, 10.0)):
        scatter(gradient=torch.tensor([[1.0], [2.0], [3.0]]) * factor, peers=of(peers, rank))
    assert [each.tolist() for each in peers] == [[[11], [22]], [[33]]]


@pytest.mark.parametrize("rank", [0, 1])
def test_linear(rank: int) -> None:
    weight = of(shards([[1, 0], [0, 1]], [[1, 1]]), rank)
    out, dx = torch.full((1, 3), torch.nan), torch.full((1, 2), torch.nan)
    linear(x=torch.tensor([[2.0, 5.0]]), weight=weight, out=out)
    linear_dx(dy=torch.ones(1, 3), weight=weight, out=dx)
    assert (out.tolist(), dx.tolist()) == ([[2, 5, 7]], [[2, 2]])


def test_wgrad() -> None:
    peers = zeros(2)
    given = [([[1.0, 0.0, 2.0]], [[3.0, 4.0]]), ([[0.0, 1.0, 1.0]], [[1.0, 1.0]])]
    for rank, (dy, x) in enumerate(given):
        wgrad(dy=torch.tensor(dy), x=torch.tensor(x), weight=of(peers, rank))
        if rank == 0:
            assert [each.tolist() for each in peers] == [[[3, 4], [0, 0]], [[6, 8]]]
    assert [each.tolist() for each in peers] == [[[3, 4], [1, 1]], [[7, 9]]]


def test_embedding() -> None:
    ids, out, peers = torch.tensor([2, 0, 2]), torch.full((3, 2), torch.nan), zeros(2)
    embedding(ids=ids, weight=of(shards([[10, 11], [20, 21]], [[30, 31]]), 0), out=out)
    embedding_grad(dy=torch.tensor([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]), ids=ids, weight=of(peers, 0))
    assert out.tolist() == [[30, 31], [10, 11], [30, 31]]
    assert [each.tolist() for each in peers] == [[[2, 2], [0, 0]], [[4, 4]]]


def test_linear_cross_entropy() -> None:
    weight, peers = of(shards([[1], [0]], [[0]]), 0), zeros(1)
    h, targets = torch.tensor([[math.log(2)]]), torch.tensor([0])
    found = linear_cross_entropy(h=h, weight=weight, targets=targets)
    near = {"rtol": 0, "atol": 5e-4}  # three digits
    torch.testing.assert_close([found.logp.item(), found.entropy.item()], [-0.693, 1.040], **near)
    dh = torch.full_like(h, torch.nan)
    linear_cross_entropy_grad(
        h=h, weight=weight, targets=targets, output=found, g_logp=torch.ones(1), gradient=of(peers, 0), dh=dh
    )
    torch.testing.assert_close(torch.cat(peers).flatten().tolist(), [0.347, -0.173, -0.173], **near)
    torch.testing.assert_close(dh.item(), 0.5, **near)


def test_linear_divergence() -> None:
    peers, h = [torch.zeros(1, 1), torch.zeros(1, 1)], torch.ones(1, 1)
    both = {
        "student": HeadInput(h=h, weight=of(shards([[math.log(3)]], [[0]]), 0)),
        "teacher": HeadInput(h=h, weight=of(shards([[0]], [[0]]), 0)),
        "beta": 0.0,
    }
    found, dh = linear_divergence(**both), torch.full_like(h, torch.nan)
    assert found.divergence.item() == pytest.approx(0.144, abs=5e-4)
    linear_divergence_grad(**both, output=found, g=torch.ones(1), gradient=of(peers, 0), dh=dh)
    assert torch.cat(peers).flatten().tolist() == pytest.approx([0.25, -0.25])  # times h
