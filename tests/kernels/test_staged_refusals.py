"""Bad arguments of `staged` raise before a launch, with the value and what to give instead."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support import place  # noqa: F401  isort: skip

from odc_kernels.linear_staged import linear_dx_staged, linear_staged
from odc_kernels.peers import PeerShards, split
from odc_kernels.staged import StagedWeight, pull


def shards(whole: torch.Tensor, world: int = 2, rank: int = 0) -> PeerShards:
    return PeerShards.of(split(whole, world), shape=whole.shape, rank=rank)


PEERS = shards(torch.zeros(8, 3))
WEIGHT = pull(peers=PEERS, staged=StagedWeight.of(PEERS))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.zeros(4, 5)}, r"give \[T, 3\]"),
        ({"x": torch.zeros(4, 3).half()}, "all in one of"),
        ({"x": torch.zeros(3, 4).t()}, "contiguous"),
        ({"x": torch.zeros(4, 3, device="meta")}, "x is on meta"),
        ({"out": torch.zeros(4, 9)}, "out is"),
        ({"weight": StagedWeight.of(PEERS)}, "never pulled"),
        ({"bias": shards(torch.zeros(7))}, "the bias has shape"),
        ({"bias": shards(torch.zeros(8), rank=1)}, "the bias has rank 1"),
        ({"spins": 0}, "spins is 0"),
        ({"spins": 2**31}, "spins is 2147483648"),
    ],
)
def test_linear_staged_refuses(change: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        linear_staged(**{"x": torch.zeros(4, 3), "weight": WEIGHT, "out": torch.zeros(4, 8)} | change)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dy": torch.zeros(4, 9)}, r"give \[T, 8\]"),
        ({"dy": torch.zeros(4, 8).double()}, "all in one of"),
        ({"out": torch.zeros(3, 4).t()}, "contiguous"),
        ({"weight": replace(WEIGHT, epoch=0)}, "never pulled"),
        ({"spins": -1}, "spins is -1"),
    ],
)
def test_linear_dx_staged_refuses(change: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        linear_dx_staged(**{"dy": torch.zeros(4, 8), "weight": WEIGHT, "out": torch.zeros(4, 3)} | change)


@pytest.mark.parametrize(
    ("peers", "words"),
    [
        (shards(torch.zeros(8, 4)), r"has shape \(8, 4\); this buffer needs shape \(8, 3\)"),
        (shards(torch.zeros(8, 3).half()), "has dtype torch.float16"),
        (shards(torch.zeros(8, 3), world=4), "has world 4"),
        (shards(torch.zeros(8, 3), rank=1), "has rank 1"),
    ],
)
def test_pull_refuses(peers: PeerShards, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        pull(peers=peers, staged=WEIGHT)


def test_a_buffer_is_for_a_matrix() -> None:
    with pytest.raises(ValueError, match=r"the weight is \(8,\)"):
        StagedWeight.of(shards(torch.zeros(8)))
