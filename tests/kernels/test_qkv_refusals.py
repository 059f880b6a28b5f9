"""Bad arguments of qkv and its backward raise before a launch, with the value and what to give instead."""

from __future__ import annotations

import pytest
import torch

from tests.support import place  # noqa: F401  isort: skip

from odc_kernels.peers import PeerShards, split
from odc_kernels.qkv import QkNorm, QkvWeights, Rope, qkv
from odc_kernels.qkv_grad import QkvGradients, qkv_grad

T, K, HEADS, KV_HEADS, D = 4, 6, 4, 2, 16


def peers(*shape: int, world: int = 2, dtype: torch.dtype = torch.float32, rank: int = 0) -> PeerShards:
    return PeerShards.of(split(torch.zeros(shape, dtype=dtype), world), shape=shape, rank=rank)


WEIGHTS = {"wq": peers(HEADS * D, K), "wk": peers(KV_HEADS * D, K), "wv": peers(KV_HEADS * D, K)}
BIASES = {"bq": peers(HEADS * D), "bk": peers(KV_HEADS * D), "bv": peers(KV_HEADS * D)}
ROPE = {"cos": torch.zeros(9, D), "sin": torch.zeros(9, D), "positions": torch.arange(T)}
NORM = QkNorm(q_weight=torch.ones(D), k_weight=torch.ones(D), eps=1e-6)
Q, KV = torch.zeros(T, HEADS, D), torch.zeros(T, KV_HEADS, D)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"wq": peers(HEADS * D)}, r"wq is \(64,\); give two dimensions"),
        ({"wk": peers(KV_HEADS * D, 0), "wv": peers(KV_HEADS * D, 0)}, "none of them 0"),
        ({"wk": peers(KV_HEADS * D, 7)}, "wk has columns 7 and wq 6"),
        ({"wv": peers(KV_HEADS * D, K, dtype=torch.bfloat16)}, "wv has dtype torch.bfloat16"),
        ({"wv": peers(KV_HEADS * D, K, world=3)}, "wv has world 3"),
        ({"wk": peers(KV_HEADS * D, K, rank=1)}, "wk has rank 1"),
        ({"wk": peers(D, K)}, "k and v need as many heads"),
        ({"bq": BIASES["bq"]}, "give all three"),
        ({**BIASES, "bk": peers(D)}, "the bias has shape"),
    ],
)
def test_weights_refuse(change: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        QkvWeights(**WEIGHTS | change)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cos": torch.zeros(1, 9, D)}, r"give both as \[P, head_dim\]"),
        ({"sin": torch.zeros(8, D)}, r"sin \(8, 16\)"),
        ({"sin": torch.zeros(9, D).half()}, "sin torch.float16"),
        ({"positions": torch.arange(T, dtype=torch.int32)}, r"torch.int32; give \[T\] of int64"),
        ({"positions": torch.arange(T)[None]}, r"give \[T\] of int64"),
        ({"positions": torch.arange(2 * T)[::2]}, "positions has strides"),
        ({"cos": torch.zeros(D, 9).t()}, "cos has strides"),
    ],
)
def test_rope_refuses(change: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Rope(**ROPE | change)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"q_weight": torch.ones(D, 1)}, r"give a contiguous \[head_dim\]"),
        ({"k_weight": torch.ones(D).double()}, "k_weight is .* of torch.float64"),
        ({"eps": 0.0}, "eps is 0.0"),
    ],
)
def test_norm_refuses(change: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        QkNorm(**{"q_weight": torch.ones(D), "k_weight": torch.ones(D), "eps": 1e-6} | change)


def of_heads(size: int) -> dict:
    return {"q": torch.zeros(T, HEADS * D // size, size)}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.zeros(T, 5)}, r"give \[T, 6\]"),
        ({"x": torch.zeros(T, K).half()}, "x is torch.float16 and the weights torch.float32"),
        ({"x": torch.zeros(K, T).t()}, "x has strides"),
        ({"x": torch.zeros(T, K, device="meta")}, "x is on meta"),
        ({"q": torch.zeros(T, HEADS * D)}, "give .T, heads, head_dim."),
        (of_heads(8), "head_dim is 8; this kernel takes .* leave this layer as it is"),
        ({"q": torch.zeros(T, 1, 80)}, "head_dim is 80"),
        ({"q": torch.zeros(T, 0, 128)}, "not whole heads of 128"),
        ({"q": torch.zeros(T + 1, HEADS, D)}, r"q is \(5, 4, 16\); give \(4, 4, 16\)"),
        ({"k": Q}, r"k is \(4, 4, 16\); give \(4, 2, 16\)"),
        ({"v": KV.half()}, "v is torch.float16"),
        ({"v": torch.zeros(KV_HEADS, T, D).transpose(0, 1)}, "v has strides"),
        ({"rope": Rope(**ROPE | {"cos": torch.zeros(9, 8), "sin": torch.zeros(9, 8)})}, "a partial rotary embedding"),
        ({"rope": Rope(**ROPE | {"cos": torch.zeros(9, 32), "sin": torch.zeros(9, 32)})}, r"give \[P, 16\]"),
        ({"rope": Rope(**ROPE | {"positions": torch.arange(3)})}, r"give \[4\], one per token"),
        (
            {"norm": QkNorm(q_weight=torch.ones(8), k_weight=torch.ones(8), eps=1e-6)},
            r"q_weight is \(8,\); give \[16\]",
        ),
        ({"norm": NORM, "q_pre": Q}, "q_pre and k_pre go together"),
        ({"q_pre": Q, "k_pre": KV}, "with a norm only"),
        ({"norm": NORM, "q_pre": KV, "k_pre": KV}, r"q_pre is \(4, 2, 16\); give \(4, 4, 16\)"),
        ({"norm": NORM, "q_pre": Q, "k_pre": KV.half()}, "k_pre is torch.float16"),
    ],
)
def test_qkv_refuses(change: dict, words: str) -> None:
    arguments = {
        "x": torch.zeros(T, K),
        "weights": QkvWeights(**WEIGHTS),
        "rope": Rope(**ROPE),
        "q": Q,
        "k": KV,
        "v": KV,
    }
    with pytest.raises(ValueError, match=words):
        qkv(**arguments | change)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dq": KV}, r"dq is \(4, 2, 16\); give \(4, 4, 16\)"),
        ({"dv": KV.half()}, "dv is torch.float16"),
        ({"norm": NORM}, "q_pre and k_pre are None"),
        ({"out": QkvGradients(q_norm=torch.zeros(D), k_norm=torch.zeros(D))}, "without a norm"),
        ({"out": QkvGradients(dx=torch.zeros(T, K).half())}, "dx is .* of torch.float16"),
        ({"out": QkvGradients(dx=torch.zeros(K, T).t())}, "dx is .* strides"),
        ({"out": QkvGradients(dx=torch.zeros(T, K, device="meta"))}, "dx is on meta"),
        ({"out": QkvGradients(wq=peers(KV_HEADS * D, K))}, r"out.wq is \(32, 6\) .* give \(64, 6\)"),
        ({"out": QkvGradients(bv=peers(KV_HEADS * D, dtype=torch.bfloat16))}, "out.bv is .* of torch.bfloat16"),
        (
            {
                "norm": NORM,
                "q_pre": Q,
                "k_pre": KV,
                "out": QkvGradients(q_norm=torch.zeros(D).half(), k_norm=torch.zeros(D)),
            },
            "q_norm is .* of torch.float16; give .16. of float32",
        ),
    ],
)
def test_qkv_grad_refuses(change: dict, words: str) -> None:
    arguments = {
        "dq": Q,
        "dk": KV,
        "dv": KV,
        "x": torch.zeros(T, K),
        "weights": QkvWeights(**WEIGHTS),
        "rope": Rope(**ROPE),
        "out": QkvGradients(),
    }
    with pytest.raises(ValueError, match=words):
        qkv_grad(**arguments | change)


def test_one_norm_alone_is_refused() -> None:
    with pytest.raises(ValueError, match="give both or none"):
        QkvGradients(q_norm=torch.zeros(D))
