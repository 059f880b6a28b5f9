"""Bad arguments of embedding and embedding_grad raise before a launch, with the value and what to give instead."""

from __future__ import annotations

import pytest
import torch

from tests.support import place  # noqa: F401  isort: skip

from odc_kernels.embedding import embedding, embedding_grad
from odc_kernels.peers import PeerShards, split

IDS, ROWS = torch.zeros(4, dtype=torch.int64), torch.zeros(4, 3)


def shards(dtype: torch.dtype = torch.float32, shape: tuple = (8, 3)) -> PeerShards:
    return PeerShards.of(split(torch.zeros(shape).to(dtype), 2), shape=shape)


BOTH = [
    ({"ids": IDS.view(2, 2)}, r"ids is \(2, 2\)"),
    ({"ids": IDS.short()}, "ids is .* in torch.int16; give .* int64 or int32"),
    ({"ids": IDS.float()}, "give .* int64 or int32"),
    ({"ids": torch.zeros(8, dtype=torch.int64)[::2]}, "contiguous"),
    ({"ids": IDS.to("meta")}, "ids is on meta"),
    ({"ids": IDS[:3]}, r"give \(3, 3\)"),
    ({"weight": shards(shape=(8,))}, r"give two dimensions \[N, K\]"),
    ({"weight": shards(shape=(8, 5))}, r"give \(4, 5\)"),
]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        *BOTH,
        ({"out": torch.zeros(4, 4)}, r"out is \(4, 4\); give \(4, 3\)"),
        ({"out": torch.zeros(3, 4).t()}, "contiguous"),
        ({"out": ROWS.half()}, "out is torch.float16 and the weight torch.float32"),
        ({"out": ROWS.to("meta")}, "out on meta"),
        ({"weight": shards(torch.float64), "out": ROWS.double()}, "out is torch.float64; give float32"),
        ({"weight": shards(torch.int32)}, "out is torch.float32 and the weight torch.int32"),
    ],
)
def test_embedding_refuses(change: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        embedding(**{"ids": IDS, "weight": shards(), "out": ROWS} | change)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        *BOTH,
        ({"dy": torch.zeros(4, 4)}, r"dy is \(4, 4\); give \(4, 3\)"),
        ({"dy": torch.zeros(3, 4).t()}, "contiguous"),
        ({"dy": ROWS.double()}, "dy is torch.float64; give float32"),
        ({"dy": ROWS.to("meta")}, "dy on meta"),
        ({"weight": shards(torch.bfloat16)}, "summed in float32"),
        ({"padding_idx": -1}, r"padding_idx is -1; give None or one of 0\.\.7"),
        ({"padding_idx": 8}, r"padding_idx is 8; give None or one of 0\.\.7"),
    ],
)
def test_embedding_grad_refuses(change: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        embedding_grad(**{"dy": ROWS, "ids": IDS, "weight": shards()} | change)
