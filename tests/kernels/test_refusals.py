"""Bad arguments raise before a launch, with the value and what to give instead: a table for each launcher."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support import place  # noqa: F401  isort: skip

from odc_kernels.embedding import embedding, embedding_grad
from odc_kernels.gather import ShardList, gather, gather_many
from odc_kernels.linear import linear
from odc_kernels.linear_cross_entropy import HeadOutput, linear_cross_entropy, linear_cross_entropy_grad
from odc_kernels.linear_staged import linear_dx_staged, linear_staged
from odc_kernels.online_softmax import SoftmaxState, online_softmax
from odc_kernels.peers import PeerShards, shards_of
from odc_kernels.qkv import qkv
from odc_kernels.qkv_grad import QkvGradients, qkv_grad
from odc_kernels.qkv_inputs import QkNorm, QkvWeights, Rope
from odc_kernels.scatter import add_block, scatter
from odc_kernels.staged import StagedWeight, pull
from odc_kernels.wgrad import wgrad

HALF, BF16, FP64, INT32, INT64 = torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.int64
zeros = torch.zeros


def peers(*shape: int, world: int = 2, rank: int = 0, dtype: torch.dtype = torch.float32) -> PeerShards:
    return PeerShards.of(shards_of(zeros(shape, dtype=dtype), world), shape=shape, rank=rank)


W = peers(8, 3)
IDS = zeros(4, dtype=INT64)
STAGED = pull(peers=W, staged=StagedWeight.of(W))

HEAD = {"h": zeros(4, 3), "weight": W, "targets": IDS}
OUTPUT = HeadOutput(logp=zeros(4), lse=zeros(4), entropy=zeros(4))

T, K, HEADS, KV_HEADS, D = 4, 6, 4, 2, 16
WEIGHTS = {"wq": peers(HEADS * D, K), "wk": peers(KV_HEADS * D, K), "wv": peers(KV_HEADS * D, K)}
BIASES = {"bq": peers(HEADS * D), "bk": peers(KV_HEADS * D), "bv": peers(KV_HEADS * D)}
ROPE = {"cos": zeros(9, D), "sin": zeros(9, D), "positions": torch.arange(T)}
NORM = {"q_weight": torch.ones(D), "k_weight": torch.ones(D), "eps": 1e-6}
Q, KV = zeros(T, HEADS, D), zeros(T, KV_HEADS, D)
QKV = {"x": zeros(T, K), "weights": QkvWeights(**WEIGHTS), "rope": Rope(**ROPE)}


def rope(**changes: torch.Tensor) -> dict[str, Rope]:
    return {"rope": Rope(**ROPE | changes)}


def normed(**more: Any) -> dict[str, Any]:
    return {"norm": QkNorm(**NORM), **more}


# Of each: what to call, arguments that it takes, and changes of these with what is said.
TABLES: list[tuple[Callable[..., Any], dict[str, Any], list[tuple[dict[str, Any], str]]]] = [
    (
        PeerShards.of,
        {},
        [
            ({"shards": [], "shape": (4,)}, "empty"),
            ({"shards": [zeros(2)], "shape": ()}, "scalar"),
            ({"shards": [zeros(3), zeros(1)], "shape": (4,)}, "shape"),
            ({"shards": [zeros(2), zeros(2).half()], "shape": (4,)}, "must agree"),
            ({"shards": [zeros(2, 2).t(), zeros(2, 2)], "shape": (4, 2)}, "contiguous"),
            ({"shards": [zeros(3)[1:], zeros(2)], "shape": (4,)}, "align it"),
            (
                {"shards": [zeros(2), zeros(2)], "shape": (4,), "device": torch.device("meta")},
                "put it on meta or pin its memory",
            ),
        ],
    ),
    (
        gather,
        {"peers": W, "out": zeros(8, 3)},
        [
            ({"out": zeros(4, 3)}, "give a contiguous"),
            ({"out": zeros(3, 8).t()}, "give a contiguous"),
            ({"out": zeros(8, 3, dtype=INT32)}, "floating-point"),
            ({"out": zeros(8, 3, device="meta")}, "on meta"),
        ],
    ),
    (
        gather_many,
        {"shards": ShardList.of([zeros(32)], [0])},
        [
            ({"out": zeros(32, dtype=FP64)}, "flat"),
            ({"out": zeros(8, 4)}, "flat"),
            ({"out": zeros(64)[::2]}, "flat"),
        ],
    ),
    (
        scatter,
        {"gradient": zeros(8, 3), "peers": W},
        [
            ({"gradient": zeros(4, 4)}, "give a contiguous"),
            ({"peers": peers(8, 3, dtype=BF16)}, "summed in float32"),
            ({"gradient": zeros(8, 3, dtype=FP64)}, "gradient is torch.float64"),
            ({"gradient": zeros(8, 3, device="meta")}, "on meta"),
        ],
    ),
    (
        add_block,
        {"target": zeros(4, 2, 8), "source": zeros(4, 2, 8)},
        [
            ({"source": zeros(3, 2, 8)}, r"source \(3, 2, 8\) .*give contiguous ones of the same size"),
            ({"source": zeros(2, 4, 8).transpose(0, 1)}, "give contiguous ones"),
            ({"target": zeros(4, 2, 8, dtype=FP64)}, "gradients are summed in float32"),
        ],
    ),
    (
        embedding,
        {"ids": IDS, "weight": W, "out": zeros(4, 3)},
        [
            ({"ids": IDS.view(2, 2)}, r"ids is \(2, 2\)"),
            ({"ids": IDS.short()}, "ids is .* in torch.int16; give .* int64 or int32"),
            ({"ids": zeros(8, dtype=INT64)[::2]}, "contiguous"),
            ({"ids": IDS.to("meta")}, "ids is on meta"),
            ({"ids": IDS[:3]}, r"give \(3, 3\)"),
            ({"weight": peers(8)}, r"give two dimensions \[N, K\]"),
            ({"weight": peers(8, 5)}, r"give \(4, 5\)"),
            ({"out": zeros(4, 4)}, r"out is \(4, 4\); give \(4, 3\)"),
            ({"out": zeros(3, 4).t()}, "contiguous"),
            ({"out": zeros(4, 3, dtype=HALF)}, "out is torch.float16 and the weight torch.float32"),
            ({"out": zeros(4, 3, device="meta")}, "out on meta"),
            ({"weight": peers(8, 3, dtype=FP64), "out": zeros(4, 3, dtype=FP64)}, "is torch.float64; give float32"),
            ({"weight": peers(8, 3, dtype=INT32)}, "out is torch.float32 and the weight torch.int32"),
        ],
    ),
    (
        embedding_grad,
        {"dy": zeros(4, 3), "ids": IDS, "weight": W},
        [
            ({"ids": IDS.float()}, "give .* int64 or int32"),
            ({"dy": zeros(4, 4)}, r"dy is \(4, 4\); give \(4, 3\)"),
            ({"dy": zeros(3, 4).t()}, "contiguous"),
            ({"dy": zeros(4, 3, dtype=FP64)}, "dy is torch.float64; give float32"),
            ({"dy": zeros(4, 3, device="meta")}, "dy on meta"),
            ({"weight": peers(8, 3, dtype=BF16)}, "summed in float32"),
            ({"padding_idx": -1}, r"padding_idx is -1; give None or one of 0\.\.7"),
            ({"padding_idx": 8}, r"padding_idx is 8; give None or one of 0\.\.7"),
        ],
    ),
    (
        linear,
        {"x": zeros(4, 3), "weight": W, "out": zeros(4, 8)},
        [
            ({"x": zeros(4, 5)}, r"give \[T, 3\]"),
            ({"x": zeros(4, 3, dtype=HALF)}, "all in one of"),
            ({"x": zeros(3, 4).t()}, "contiguous"),
            ({"x": zeros(4, 3, device="meta")}, "on meta"),
            ({"out": zeros(4, 9)}, "out is"),
            ({"bias": peers(7)}, "the bias has shape"),
        ],
    ),
    (
        wgrad,
        {"dy": zeros(4, 8), "x": zeros(4, 3), "weight": W},
        [
            ({"x": zeros(5, 3)}, "give"),
            ({"dy": zeros(4, 9)}, "the weight is"),
            ({"dy": zeros(4, 8, dtype=FP64)}, "give both in"),
            ({"dy": zeros(8, 4).t()}, "contiguous"),
            ({"weight": peers(8, 3, dtype=BF16)}, "summed in float32"),
            ({"bias": peers(7)}, "the bias has shape"),
            ({"bias": peers(8, world=4)}, "the bias has world 4"),
        ],
    ),
    (StagedWeight.of, {}, [({"peers": peers(8)}, r"the weight is \(8,\)")]),
    (
        pull,
        {"staged": STAGED},
        [
            ({"peers": peers(8, 4)}, r"has shape \(8, 4\); this buffer needs shape \(8, 3\)"),
            ({"peers": peers(8, 3, dtype=HALF)}, "has dtype torch.float16"),
            ({"peers": peers(8, 3, world=4)}, "has world 4"),
            ({"peers": peers(8, 3, rank=1)}, "has rank 1"),
        ],
    ),
    (
        linear_staged,
        {"x": zeros(4, 3), "weight": STAGED, "out": zeros(4, 8)},
        [
            ({"x": zeros(4, 5)}, r"give \[T, 3\]"),
            ({"x": zeros(4, 3, dtype=HALF)}, "all in one of"),
            ({"x": zeros(3, 4).t()}, "contiguous"),
            ({"x": zeros(4, 3, device="meta")}, "x is on meta"),
            ({"out": zeros(4, 9)}, "out is"),
            ({"weight": StagedWeight.of(W)}, "never pulled"),
            ({"bias": peers(7)}, "the bias has shape"),
            ({"bias": peers(8, rank=1)}, "the bias has rank 1"),
            ({"spins": 0}, "spins is 0"),
            ({"spins": 2**31}, "spins is 2147483648"),
        ],
    ),
    (
        linear_dx_staged,
        {"dy": zeros(4, 8), "weight": STAGED, "out": zeros(4, 3)},
        [
            ({"dy": zeros(4, 9)}, r"give \[T, 8\]"),
            ({"dy": zeros(4, 8, dtype=FP64)}, "all in one of"),
            ({"out": zeros(3, 4).t()}, "contiguous"),
            ({"weight": replace(STAGED, epoch=0)}, "never pulled"),
            ({"spins": -1}, "spins is -1"),
        ],
    ),
    (
        linear_cross_entropy,
        HEAD,
        [
            ({"weight": peers(8)}, r"the weight is \(8,\); give \[V, D\]"),
            ({"weight": PeerShards.of([zeros(0, 3)], shape=(0, 3))}, "V and D at least 1"),
            ({"h": zeros(4, 5)}, r"h is \(4, 5\).*give \[T, 3\]"),
            ({"h": zeros(12)}, r"give \[T, 3\]"),
            ({"h": zeros(4, 3, dtype=HALF)}, "h is torch.float16, the weight torch.float32"),
            ({"h": zeros(4, 3, dtype=FP64), "weight": peers(8, 3, dtype=FP64)}, "give both in float32"),
            ({"h": zeros(3, 4).t()}, "h has strides"),
            ({"targets": zeros(5, dtype=INT64)}, r"give int64 \(4,\)"),
            ({"targets": zeros(4, dtype=INT32)}, "targets is torch.int32"),
            ({"targets": IDS.to("meta")}, "targets on meta"),
            ({"logit_scale": float("nan")}, "logit_scale is nan"),
            ({"chunk": 0}, "chunk is 0"),
            ({"chunk": 24}, "chunk is 24; give a positive multiple of 16"),
        ],
    ),
    (
        linear_cross_entropy_grad,
        HEAD | {"output": OUTPUT, "g_logp": zeros(4), "gradient": W, "dh": zeros(4, 3)},
        [
            ({"h": zeros(4, 5)}, r"h is \(4, 5\).*give \[T, 3\]"),
            ({"g_logp": zeros(5)}, r"g_logp is torch.float32 \(5,\)"),
            ({"g_logp": zeros(4, dtype=BF16)}, "g_logp is torch.bfloat16"),
            ({"g_entropy": zeros(4, device="meta")}, "g_entropy is .* on meta"),
            ({"output": replace(OUTPUT, lse=zeros(3))}, "output.lse is"),
            ({"output": replace(OUTPUT, entropy=zeros(3))}, "output.entropy is"),
            ({"dh": zeros(5, 3)}, r"dh is \(5, 3\)"),
            ({"dh": zeros(3, 4).t()}, "give a contiguous"),
            ({"dh": zeros(4, 3, device="meta")}, "on meta"),
            ({"dh": zeros(4, 3, dtype=HALF)}, "dh is torch.float16; give h's torch.float32"),
            ({"gradient": peers(9, 3)}, r"the gradient has shape \(9, 3\)"),
            ({"gradient": peers(8, 3, dtype=BF16)}, "the gradient has dtype torch.bfloat16"),
            ({"gradient": peers(8, 3, world=4)}, "the gradient has world 4"),
            ({"gradient": peers(8, 3, rank=1)}, "the gradient has rank 1"),
        ],
    ),
    (
        online_softmax,  # rows must begin at vectors
        {"first": 0, "targets": IDS, "state": SoftmaxState.of(4, IDS.device), "scale": 1.0},
        [
            ({"logits": zeros(4, 15)}, "multiples of 16"),
            ({"logits": zeros(16, 16).t()[:, ::2]}, "multiples of 16"),
            ({"logits": zeros(16)}, "multiples of 16"),
        ],
    ),
    (
        QkvWeights,
        WEIGHTS,
        [
            ({"wq": peers(HEADS * D)}, r"wq is \(64,\); give two dimensions"),
            ({"wk": peers(KV_HEADS * D, 0), "wv": peers(KV_HEADS * D, 0)}, "none of them 0"),
            ({"wk": peers(KV_HEADS * D, 7)}, "wk has columns 7 and wq 6"),
            ({"wv": peers(KV_HEADS * D, K, dtype=BF16)}, "wv has dtype torch.bfloat16"),
            ({"wv": peers(KV_HEADS * D, K, world=3)}, "wv has world 3"),
            ({"wk": peers(KV_HEADS * D, K, rank=1)}, "wk has rank 1"),
            ({"wk": peers(D, K)}, "k and v need as many heads"),
            ({"bq": BIASES["bq"]}, "give all three"),
            ({**BIASES, "bk": peers(D)}, "the bias has shape"),
        ],
    ),
    (
        Rope,
        ROPE,
        [
            ({"cos": zeros(1, 9, D)}, r"give both as \[P, head_dim\]"),
            ({"sin": zeros(8, D)}, r"sin \(8, 16\)"),
            ({"sin": zeros(9, D, dtype=HALF)}, "sin torch.float16"),
            ({"positions": torch.arange(T, dtype=INT32)}, r"torch.int32; give \[T\] of int64"),
            ({"positions": torch.arange(T)[None]}, r"give \[T\] of int64"),
            ({"positions": torch.arange(2 * T)[::2]}, "positions has strides"),
            ({"cos": zeros(D, 9).t()}, "cos has strides"),
        ],
    ),
    (
        QkNorm,
        NORM,
        [
            ({"q_weight": torch.ones(D, 1)}, r"give a contiguous \[head_dim\]"),
            ({"k_weight": torch.ones(D).double()}, "k_weight is .* of torch.float64"),
            ({"eps": 0.0}, "eps is 0.0"),
        ],
    ),
    (
        qkv,
        QKV | {"q": Q, "k": KV, "v": KV},
        [
            ({"x": zeros(T, 5)}, r"give \[T, 6\]"),
            ({"x": zeros(T, K, dtype=HALF)}, "x is torch.float16 and the weights torch.float32"),
            ({"x": zeros(K, T).t()}, "x has strides"),
            ({"x": zeros(T, K, device="meta")}, "x is on meta"),
            ({"q": zeros(T, HEADS * D)}, "give .T, heads, head_dim."),
            ({"q": zeros(T, HEADS * D // 8, 8)}, "head_dim is 8; this kernel takes .* leave this layer as it is"),
            ({"q": zeros(T, 1, 80)}, "head_dim is 80"),
            ({"q": zeros(T, 0, 128)}, "not whole heads of 128"),
            ({"q": zeros(T + 1, HEADS, D)}, r"q is \(5, 4, 16\); give \(4, 4, 16\)"),
            ({"k": Q}, r"k is \(4, 4, 16\); give \(4, 2, 16\)"),
            ({"v": KV.half()}, "v is torch.float16"),
            ({"v": zeros(KV_HEADS, T, D).transpose(0, 1)}, "v has strides"),
            (rope(cos=zeros(9, 8), sin=zeros(9, 8)), "a partial rotary embedding"),
            (rope(cos=zeros(9, 32), sin=zeros(9, 32)), r"give \[P, 16\]"),
            (rope(positions=torch.arange(3)), r"give \[4\], one per token"),
            (
                {"norm": QkNorm(q_weight=torch.ones(8), k_weight=torch.ones(8), eps=1e-6)},
                r"q_weight is \(8,\); give \[16\]",
            ),
            (normed(q_pre=Q), "q_pre and k_pre go together"),
            ({"q_pre": Q, "k_pre": KV}, "with a norm only"),
            (normed(q_pre=KV, k_pre=KV), r"q_pre is \(4, 2, 16\); give \(4, 4, 16\)"),
            (normed(q_pre=Q, k_pre=KV.half()), "k_pre is torch.float16"),
        ],
    ),
    (QkvGradients, {}, [({"q_norm": zeros(D)}, "give both or none")]),
    (
        qkv_grad,
        QKV | {"dq": Q, "dk": KV, "dv": KV, "out": QkvGradients()},
        [
            ({"dq": KV}, r"dq is \(4, 2, 16\); give \(4, 4, 16\)"),
            ({"dv": KV.half()}, "dv is torch.float16"),
            (normed(), "q_pre and k_pre are None"),
            ({"out": QkvGradients(q_norm=zeros(D), k_norm=zeros(D))}, "without a norm"),
            ({"out": QkvGradients(dx=zeros(T, K, dtype=HALF))}, "dx is .* of torch.float16"),
            ({"out": QkvGradients(dx=zeros(K, T).t())}, "dx is .* strides"),
            ({"out": QkvGradients(dx=zeros(T, K, device="meta"))}, "dx is on meta"),
            ({"out": QkvGradients(wq=peers(KV_HEADS * D, K))}, r"out.wq is \(32, 6\) .* give \(64, 6\)"),
            ({"out": QkvGradients(bv=peers(KV_HEADS * D, dtype=BF16))}, "out.bv is .* of torch.bfloat16"),
            (
                normed(q_pre=Q, k_pre=KV, out=QkvGradients(q_norm=zeros(D, dtype=HALF), k_norm=zeros(D))),
                "q_norm is .* of torch.float16; give .16. of float32",
            ),
        ],
    ),
]


@pytest.mark.parametrize(
    ("call", "given", "words"),
    [
        pytest.param(call, given | change, words, id=f"{call.__name__}-{words}")
        for call, given, changes in TABLES
        for change, words in changes
    ],
)
def test_it_refuses(call: Callable[..., Any], given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call(**given)
