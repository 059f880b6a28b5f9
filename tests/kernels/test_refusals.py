"""Bad arguments raise before a launch, with the value and what to give instead."""

from __future__ import annotations

import pytest
import torch

from tests.support import place  # noqa: F401  isort: skip

from odc_kernels.gather import gather
from odc_kernels.linear import linear
from odc_kernels.peers import PeerShards, split
from odc_kernels.scatter import scatter
from odc_kernels.wgrad import wgrad


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"out": torch.empty(4, 4)}, "give a contiguous"),
        ({"out": torch.empty(4, 8).t()}, "give a contiguous"),
        ({"out": torch.empty(8, 4, dtype=torch.int32)}, "floating-point"),
        ({"out": torch.empty(8, 4, device="meta")}, "on meta"),
    ],
)
def test_gather_refuses(change: dict, words: str) -> None:
    peers = PeerShards.of(split(torch.randn(8, 4), 2), shape=(8, 4))
    with pytest.raises(ValueError, match=words):
        gather(**{"peers": peers, "out": torch.empty(8, 4)} | change)


@pytest.mark.parametrize(
    ("gradient", "dtype", "words"),
    [
        (torch.empty(4, 4), torch.float32, "give a contiguous"),
        (torch.empty(8, 4), torch.bfloat16, "summed in float32"),
        (torch.empty(8, 4, dtype=torch.float64), torch.float32, "gradient is torch.float64"),
        (torch.empty(8, 4, device="meta"), torch.float32, "on meta"),
    ],
)
def test_scatter_refuses(gradient: torch.Tensor, dtype: torch.dtype, words: str) -> None:
    peers = PeerShards.of(split(torch.randn(8, 4).to(dtype), 2), shape=(8, 4))
    with pytest.raises(ValueError, match=words):
        scatter(gradient=gradient, peers=peers)


@pytest.mark.parametrize(
    ("shards", "shape", "words"),
    [
        ([], (4,), "empty"),
        ([torch.zeros(2)], (), "scalar"),
        ([torch.zeros(3), torch.zeros(1)], (4,), "shape"),
        ([torch.zeros(2), torch.zeros(2).half()], (4,), "must agree"),
        ([torch.zeros(2, 2).t(), torch.zeros(2, 2)], (4, 2), "contiguous"),
        ([torch.zeros(3)[1:], torch.zeros(2)], (4,), "align it"),
    ],
)
def test_peers_refuse(shards: list, shape: tuple, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        PeerShards.of(shards, shape=shape)


X, DY, OUT = torch.zeros(4, 3), torch.zeros(4, 8), torch.zeros(4, 8)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.zeros(4, 5)}, r"give \[T, 3\]"),
        ({"x": torch.zeros(4, 3).half()}, "all in one of"),
        ({"x": torch.zeros(3, 4).t()}, "contiguous"),
        ({"x": torch.zeros(4, 3, device="meta")}, "on meta"),
        ({"out": torch.zeros(4, 9)}, "out is"),
        ({"bias": PeerShards.of(split(torch.zeros(7), 2), shape=(7,))}, "the bias has shape"),
    ],
)
def test_linear_refuses(change: dict, words: str) -> None:
    weight = PeerShards.of(split(torch.zeros(8, 3), 2), shape=(8, 3))
    with pytest.raises(ValueError, match=words):
        linear(**{"x": X, "weight": weight, "out": OUT} | change)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.zeros(5, 3)}, "give"),
        ({"dy": torch.zeros(4, 9)}, "the weight is"),
        ({"dy": torch.zeros(4, 8).double()}, "give both in"),
        ({"dy": torch.zeros(8, 4).t()}, "contiguous"),
        ({"weight": PeerShards.of(split(torch.zeros(8, 3).bfloat16(), 2), shape=(8, 3))}, "summed in float32"),
        ({"bias": PeerShards.of(split(torch.zeros(7), 2), shape=(7,))}, "the bias has shape"),
        ({"bias": PeerShards.of(split(torch.zeros(8), 4), shape=(8,))}, "the bias has world 4"),
    ],
)
def test_wgrad_refuses(change: dict, words: str) -> None:
    weight = PeerShards.of(split(torch.zeros(8, 3), 2), shape=(8, 3))
    with pytest.raises(ValueError, match=words):
        wgrad(**{"dy": DY, "x": X, "weight": weight} | change)
