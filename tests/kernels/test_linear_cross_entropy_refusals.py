"""Bad arguments of the head raise before a launch, with the value and what to give instead."""

from __future__ import annotations

import pytest
import torch

from tests.support import place  # noqa: F401  isort: skip

from odc_kernels.linear_cross_entropy import HeadOutput, linear_cross_entropy, linear_cross_entropy_grad
from odc_kernels.online_softmax import SoftmaxState, online_softmax
from odc_kernels.peers import PeerShards, split


def shards(rows: int, columns: int, world: int = 2, rank: int = 0, dtype: torch.dtype = torch.float32) -> PeerShards:
    whole = torch.zeros(rows, columns, dtype=dtype)
    return PeerShards.of(split(whole, world), shape=(rows, columns), rank=rank)


GIVEN = {"h": torch.zeros(4, 3), "weight": shards(8, 3), "targets": torch.zeros(4, dtype=torch.int64)}
BAD_HEADS = [
    ({"weight": PeerShards.of(split(torch.zeros(8), 2), shape=(8,))}, r"the weight is \(8,\); give \[V, D\]"),
    ({"weight": PeerShards.of([torch.zeros(0, 3)], shape=(0, 3))}, "V and D at least 1"),
    ({"h": torch.zeros(4, 5)}, r"h is \(4, 5\).*give \[T, 3\]"),
    ({"h": torch.zeros(12)}, r"give \[T, 3\]"),
    ({"h": torch.zeros(4, 3).half()}, "h is torch.float16, the weight torch.float32"),
    ({"h": torch.zeros(4, 3).double(), "weight": shards(8, 3, dtype=torch.float64)}, "give both in float32"),
    ({"h": torch.zeros(3, 4).t()}, "h has strides"),
    ({"targets": torch.zeros(5, dtype=torch.int64)}, r"give int64 \(4,\)"),
    ({"targets": torch.zeros(4, dtype=torch.int32)}, "targets is torch.int32"),
    ({"targets": torch.zeros(4, dtype=torch.int64, device="meta")}, "targets on meta"),
    ({"logit_scale": float("nan")}, "logit_scale is nan"),
    ({"chunk": 0}, "chunk is 0"),
    ({"chunk": 24}, "chunk is 24; give a positive multiple of 16"),
]


def _name(value: dict | str) -> str:
    """Of a case: addresses, which every process has others of, are no part of it."""
    return value if isinstance(value, str) else ", ".join(value)


@pytest.mark.parametrize(("change", "words"), BAD_HEADS, ids=_name)
def test_forward_refuses(change: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        linear_cross_entropy(**GIVEN | change)


def per_token(tokens: int = 4, **options: object) -> torch.Tensor:
    return torch.zeros(tokens, **options)


OUTPUT = HeadOutput(logp=per_token(), lse=per_token(), entropy=per_token())
BACKWARD = GIVEN | {
    "output": OUTPUT,
    "g_logp": per_token(),
    "gradient": shards(8, 3),
    "dh": torch.zeros(4, 3),
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        *BAD_HEADS,
        ({"g_logp": per_token(5)}, r"g_logp is torch.float32 \(5,\)"),
        ({"g_logp": per_token(dtype=torch.bfloat16)}, "g_logp is torch.bfloat16"),
        ({"g_entropy": per_token(device="meta")}, "g_entropy is .* on meta"),
        ({"output": HeadOutput(logp=per_token(), lse=per_token(3), entropy=per_token())}, "output.lse is"),
        ({"output": HeadOutput(logp=per_token(), lse=per_token(), entropy=per_token(3))}, "output.entropy is"),
        ({"dh": torch.zeros(5, 3)}, r"dh is \(5, 3\)"),
        ({"dh": torch.zeros(3, 4).t()}, "give a contiguous"),
        ({"dh": torch.zeros(4, 3, device="meta")}, "on meta"),
        ({"dh": torch.zeros(4, 3).half()}, "dh is torch.float16; give h's torch.float32"),
        ({"gradient": shards(9, 3)}, r"the gradient has shape \(9, 3\)"),
        ({"gradient": shards(8, 3, dtype=torch.bfloat16)}, "the gradient has dtype torch.bfloat16"),
        ({"gradient": shards(8, 3, world=4)}, "the gradient has world 4"),
        ({"gradient": shards(8, 3, rank=1)}, "the gradient has rank 1"),
    ],
    ids=_name,
)
def test_backward_refuses(change: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        linear_cross_entropy_grad(**BACKWARD | change)


@pytest.mark.parametrize("logits", [torch.zeros(4, 15), torch.zeros(16, 16).t()[:, ::2], torch.zeros(16)], ids=str)
def test_softmax_refuses_rows_that_do_not_begin_at_vectors(logits: torch.Tensor) -> None:
    state = SoftmaxState.of(4, logits.device)
    with pytest.raises(ValueError, match="multiples of 16"):
        online_softmax(logits=logits, first=0, targets=GIVEN["targets"], state=state, scale=1.0)
