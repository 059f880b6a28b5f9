"""Bad arguments raise before a launch, with the value and what to give instead: a table for each launcher."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support import place  # noqa: F401  isort: skip

from odc_kernels.embedding import embedding, embedding_grad
from odc_kernels.experts import Gate, grouped_linear, grouped_linear_dx
from odc_kernels.experts_wgrad import grouped_wgrad
from odc_kernels.gather import ShardList, gather, gather_many
from odc_kernels.linear import linear, linear_dx
from odc_kernels.linear_cross_entropy import HeadOutput, linear_cross_entropy, linear_cross_entropy_grad
from odc_kernels.linear_divergence import HeadInput, linear_divergence
from odc_kernels.linear_staged import linear_dx_staged, linear_staged
from odc_kernels.online_softmax import SoftmaxState, online_softmax
from odc_kernels.peers import PeerShards, check_apart, check_tensor, shards_of
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

EXPERTS, OFFSETS = peers(3, 8, 4), zeros(4, dtype=INT32)
GROUPED = {"x": zeros(5, 4), "offsets": OFFSETS, "weight": EXPERTS, "out": zeros(5, 8)}

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


TENSOR = {"what": "x", "shape": (4, 3), "dtype": (torch.float32, BF16), "device": IDS.device}

# Of each: what to call, arguments that it takes, and changes of these with what is said. Most tensors go through
# `check_tensor`: of each one wrong shape, dtype, layout or device shows that it does.
TABLES: list[tuple[Callable[..., Any], dict[str, Any], list[tuple[dict[str, Any], str]]]] = [
    (
        check_tensor,
        TENSOR,
        [
            ({"given": zeros(3, 4)}, r"x is torch.float32 \(3, 4\) .*; give a contiguous .* or .*bfloat16 \(4, 3\)"),
            ({"given": zeros(4, 3, dtype=HALF)}, "x is torch.float16"),
            ({"given": zeros(3, 4).t()}, r"with strides \(1, 4\)"),
            ({"given": zeros(4, 3, device="meta")}, "on meta; give"),
            ({"given": zeros(4), "contiguous": False}, "give torch.float32 or"),
        ],
    ),
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
            ({"shards": [zeros(2)] * 2, "shape": (4,), "device": torch.device("meta")}, "put it on meta or pin its"),
        ],
    ),
    (gather, {"peers": W}, [({"out": zeros(3, 8).t()}, "out is"), ({"out": zeros(8, 3, dtype=INT32)}, "out is")]),
    (gather, {"out": zeros(8, 3)}, [({"peers": peers(8, 3, dtype=INT32)}, "floating-point")]),
    (
        gather_many,
        {"shards": ShardList.of([zeros(32)], [0])},
        [({"out": zeros(32, dtype=FP64)}, "flat"), ({"out": zeros(8, 4)}, "flat"), ({"out": zeros(64)[::2]}, "flat")],
    ),
    (
        scatter,
        {"gradient": zeros(8, 3), "peers": W},
        [({"gradient": zeros(8, 3, dtype=FP64)}, "gradient is"), ({"peers": peers(8, 3, dtype=BF16)}, "summed in")],
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
            ({"ids": IDS.short()}, "ids is torch.int16"),
            ({"weight": peers(8)}, r"give two dimensions \[N, K\]"),
            ({"out": zeros(4, 4)}, r"out is .*; give .* \(4, 3\)"),
            ({"weight": peers(8, 3, dtype=FP64), "out": zeros(4, 3, dtype=FP64)}, "the weight is torch.float64"),
        ],
    ),
    (
        embedding_grad,
        {"dy": zeros(4, 3), "ids": IDS, "weight": W},
        [
            ({"ids": IDS.float()}, "give .*int64 or torch.int32"),
            ({"dy": zeros(4, 3, dtype=FP64)}, "dy is torch.float64"),
            ({"weight": peers(8, 3, dtype=BF16)}, "summed in float32"),
            ({"padding_idx": -1}, r"padding_idx is -1; give None or one of 0\.\.7"),
            ({"padding_idx": 8}, r"padding_idx is 8; give None or one of 0\.\.7"),
        ],
    ),
    (
        linear,
        {"x": zeros(4, 3), "weight": W, "out": zeros(4, 8)},
        [
            ({"weight": peers(8)}, r"give two dimensions \[N, K\]"),
            ({"weight": peers(8, 3, dtype=FP64)}, "the weight is torch.float64"),
            ({"x": zeros(4, 5)}, "x is"),
            ({"out": zeros(4, 9)}, "out is"),
            ({"bias": peers(7)}, "the bias has shape"),
        ],
    ),
    (
        wgrad,
        {"dy": zeros(4, 8), "x": zeros(4, 3), "weight": W},
        [
            ({"x": zeros(5, 3)}, "x is"),
            ({"x": zeros(4, 3, dtype=HALF)}, "x is torch.float16"),
            ({"dy": zeros(4, 8, dtype=FP64)}, "dy is torch.float64"),
            ({"weight": peers(8, 3, dtype=BF16)}, "summed in float32"),
            ({"bias": peers(8, world=4)}, "the bias has world 4"),
        ],
    ),
    (Gate, {}, [({"limit": 0.0}, "limit is 0.0"), ({"alpha": 1.702}, "alpha is 1.702 without a limit")]),
    (
        grouped_linear,
        GROUPED,
        [
            ({"weight": W}, r"the weight is \(8, 3\); give \[E, N, K\], or transposed \[E, K, N\]"),
            ({"weight": peers(3, 8, 0)}, "with N and K at least 1"),
            ({"weight": peers(3, 8, 4, dtype=FP64)}, "the weight is torch.float64"),
            ({"offsets": OFFSETS.long()}, "offsets is torch.int64"),
            ({"offsets": zeros(3, dtype=INT32)}, r"offsets is .*; give .* \(4,\)"),
            ({"gate": Gate()}, r"out is .*; give .* \(5, 4\)"),
            ({"gate": Gate(), "weight": peers(3, 7, 4)}, "makes 7 features; a gate needs an even number"),
            ({"gate": Gate(), "out": zeros(5, 4), "pre": zeros(5, 4)}, "pre is"),
            ({"pre": zeros(5, 8)}, "pre is given without a gate"),
            ({"bias": peers(3, 4)}, r"the bias has shape \(3, 4\)"),
        ],
    ),
    (
        grouped_wgrad,
        {"dy": zeros(5, 8), "x": zeros(5, 4), "offsets": OFFSETS, "weight": EXPERTS},
        [
            ({"x": zeros(6, 4)}, "x is"),
            ({"offsets": OFFSETS.to("meta")}, "offsets is .* on meta"),
            ({"bias": peers(3, 8, rank=1)}, "the bias has rank 1"),
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
            ({"x": zeros(4, 5)}, "x is"),
            ({"weight": StagedWeight.of(W)}, "never pulled"),
            ({"bias": peers(8, rank=1)}, "the bias has rank 1"),
            ({"spins": 0}, "spins is 0"),
            ({"spins": 2**31}, "spins is 2147483648"),
        ],
    ),
    (
        linear_dx_staged,
        {"dy": zeros(4, 8), "weight": STAGED, "out": zeros(4, 3)},
        [
            ({"out": zeros(3, 4).t()}, "out is"),
            ({"weight": replace(STAGED, epoch=0)}, "never pulled"),
            ({"spins": -1}, "spins is -1"),
        ],
    ),
    (
        linear_cross_entropy,
        HEAD,
        [
            ({"weight": peers(8)}, r"the weight is \(8,\); give two dimensions"),
            ({"weight": PeerShards.of([zeros(0, 3)], shape=(0, 3))}, "V and D at least 1"),
            ({"h": zeros(4, 3, dtype=HALF)}, "h is torch.float16"),
            ({"targets": zeros(5, dtype=INT64)}, "targets is"),
            ({"logit_scale": float("nan")}, "logit_scale is nan"),
            ({"chunk": 0}, "chunk is 0"),
            ({"chunk": 24}, "chunk is 24; give a positive multiple of 16"),
        ],
    ),
    (
        linear_cross_entropy_grad,
        HEAD | {"output": OUTPUT, "g_logp": zeros(4), "gradient": W, "dh": zeros(4, 3)},
        [
            ({"h": zeros(4, 5)}, "h is"),
            ({"g_logp": zeros(4, dtype=BF16)}, "g_logp is torch.bfloat16"),
            ({"g_entropy": zeros(4, device="meta")}, "g_entropy is .* on meta"),
            ({"output": replace(OUTPUT, lse=zeros(3))}, "output.lse is"),
            ({"output": replace(OUTPUT, entropy=zeros(3))}, "output.entropy is"),
            ({"dh": zeros(4, 3, dtype=HALF)}, "dh is torch.float16"),
            ({"gradient": peers(9, 3)}, r"the gradient has shape \(9, 3\)"),
            ({"gradient": peers(8, 3, dtype=BF16)}, "the gradient has dtype torch.bfloat16"),
        ],
    ),
    (
        online_softmax,  # rows must begin at vectors
        {"first": 0, "targets": IDS, "state": SoftmaxState.of(4, IDS.device), "scale": 1.0},
        [({"logits": zeros(4, 15)}, "multiples of 16"), ({"logits": zeros(16, 16).t()[:, ::2]}, "multiples of 16")],
    ),
    (
        QkvWeights,
        WEIGHTS,
        [
            ({"wq": peers(HEADS * D)}, r"wq is \(64,\); give two dimensions"),
            ({"wk": peers(KV_HEADS * D, 0), "wv": peers(KV_HEADS * D, 0)}, "none of them 0"),
            ({"wk": peers(KV_HEADS * D, 7)}, r"wk has shape \(32, 7\); this wq needs shape \(32, 6\)"),
            ({"wv": peers(KV_HEADS * D, K, world=3)}, "wv has world 3"),
            ({"wk": peers(D, K)}, "wv has shape"),
            ({"bq": BIASES["bq"]}, "give all three"),
            ({**BIASES, "bk": peers(D)}, "the bias has shape"),
        ],
    ),
    (
        Rope,
        ROPE,
        [
            ({"cos": zeros(1, 9, D)}, r"give \[P, D\] and \[T\]"),
            ({"cos": zeros(D, 9).t()}, "cos is"),
            ({"sin": zeros(9, D, dtype=HALF)}, "sin is torch.float16"),
            ({"positions": torch.arange(T, dtype=INT32)}, "positions is torch.int32"),
            ({"positions": torch.arange(T)[None]}, r"give \[P, D\] and \[T\]"),
        ],
    ),
    (
        QkNorm,
        NORM,
        [
            ({"q_weight": torch.ones(D, 1)}, "q_weight is"),
            ({"k_weight": torch.ones(D).double()}, "k_weight is torch.float64"),
            ({"eps": 0.0}, "eps is 0.0"),
        ],
    ),
    (
        qkv,
        QKV | {"q": Q, "k": KV, "v": KV},
        [
            ({"x": zeros(T, K, dtype=HALF)}, "x is torch.float16"),
            ({"q": zeros(T, HEADS * D)}, "give .T, heads, head_dim."),
            ({"q": zeros(T, HEADS * D // 8, 8)}, "head_dim is 8; this kernel takes .* leave this layer as it is"),
            ({"q": zeros(T, 0, 128)}, "not whole heads of 128"),
            ({"q": zeros(T + 1, HEADS, D)}, "q is"),
            ({"k": Q}, r"k is .*; give .* \(4, 2, 16\)"),
            ({"v": zeros(KV_HEADS, T, D).transpose(0, 1)}, "v is"),
            (rope(cos=zeros(9, 8), sin=zeros(9, 8)), "a partial rotary embedding"),
            (rope(cos=zeros(9, 32), sin=zeros(9, 32)), r"give .* \(9, 16\)"),
            (rope(positions=torch.arange(3)), r"positions is .*; give .* \(4,\)"),
            ({"norm": QkNorm(q_weight=torch.ones(8), k_weight=torch.ones(8), eps=1e-6)}, "q_weight is"),
            (normed(q_pre=Q), "q_pre and k_pre go together"),
            ({"q_pre": Q, "k_pre": KV}, "with a norm only"),
            (normed(q_pre=KV, k_pre=KV), "q_pre is"),
        ],
    ),
    (QkvGradients, {}, [({"q_norm": zeros(D)}, "give both or none")]),
    (
        qkv_grad,
        QKV | {"dq": Q, "dk": KV, "dv": KV, "out": QkvGradients()},
        [
            ({"dq": KV}, "dq is"),
            ({"dv": KV.half()}, "dv is torch.float16"),
            (normed(), "q_pre and k_pre are None"),
            ({"out": QkvGradients(q_norm=zeros(D), k_norm=zeros(D))}, "without a norm"),
            ({"out": QkvGradients(dx=zeros(T, K, dtype=HALF))}, "dx is torch.float16"),
            ({"out": QkvGradients(wq=peers(KV_HEADS * D, K))}, r"out.wq has .*\(32, 6\).*; give \(\(64, 6\)"),
            ({"out": QkvGradients(bv=peers(KV_HEADS * D, dtype=BF16))}, "out.bv has .*bfloat16"),
            (normed(q_pre=Q, k_pre=KV, out=QkvGradients(q_norm=zeros(D, dtype=HALF), k_norm=zeros(D))), "q_norm is"),
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


X, SQUARE, Y = zeros(4, 8), peers(8, 8), zeros(8, 8)
XW = zeros(T, HEADS * D)
WIDE = QkvWeights(**{name: peers(HEADS * D, HEADS * D) for name in WEIGHTS})
HEADS_OF = {"weights": WIDE, "rope": Rope(**ROPE)}
FLOAT_IDS, BOTH = zeros(8, 4), zeros(40)

# Of each operator that writes into a tensor of the caller's: arguments of which an output is an input.
ALIASED: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (linear, {"x": X, "weight": SQUARE, "out": X}, "out"),
    (linear, {"x": Y[:4], "weight": SQUARE, "out": Y[3:7]}, "out"),
    (linear, {"x": zeros(4, 8), "weight": SQUARE, "out": SQUARE.shards[0]}, "out"),
    (linear_dx, {"dy": X, "weight": SQUARE, "out": X}, "out"),
    (linear_staged, {"x": X, "weight": pull(peers=SQUARE, staged=StagedWeight.of(SQUARE)), "out": X}, "out"),
    (linear_dx_staged, {"dy": X, "weight": pull(peers=SQUARE, staged=StagedWeight.of(SQUARE)), "out": X}, "out"),
    (grouped_linear, GROUPED | {"weight": (CUBE := peers(3, 4, 4)), "out": GROUPED["x"]}, "out"),
    (grouped_linear, GROUPED | {"gate": Gate(), "out": BOTH[:20].view(5, 4), "pre": BOTH.view(5, 8)}, "out"),
    (grouped_linear, GROUPED | {"gate": Gate(), "x": BOTH[:20].view(5, 4), "pre": BOTH.view(5, 8)}, "pre"),
    (grouped_linear_dx, {"dy": X.view(8, 4), "offsets": OFFSETS, "weight": CUBE, "out": X.view(8, 4)}, "out"),
    (gather, {"peers": (ONE := PeerShards.local(zeros(8, 3))), "out": ONE.shards[0]}, "out"),
    (
        embedding,
        {"ids": FLOAT_IDS.view(torch.int32)[0, :3], "weight": ONE, "out": FLOAT_IDS.view(-1)[:9].view(3, 3)},
        "out",
    ),
    (linear_cross_entropy_grad, HEAD | {"output": OUTPUT, "g_logp": zeros(4), "gradient": W, "dh": HEAD["h"]}, "dh"),
    (qkv, HEADS_OF | {"x": XW, "q": XW.view(T, HEADS, D), "k": zeros(T, HEADS, D), "v": zeros(T, HEADS, D)}, "q"),
    (qkv, HEADS_OF | {"x": XW, "q": zeros(T, HEADS, D), "k": Q, "v": Q}, "k"),
    (qkv_grad, HEADS_OF | {"x": XW, "dq": Q, "dk": Q, "dv": Q, "out": QkvGradients(dx=XW)}, "dx"),
    (qkv_grad, HEADS_OF | {"x": XW, "dq": Q, "dk": Q, "dv": Q, "out": QkvGradients(dx=Q.view(T, -1))}, "dx"),
]


@pytest.mark.parametrize(("call", "given", "name"), ALIASED)
def test_it_refuses_an_output_that_is_an_input(call: Callable[..., Any], given: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} shares memory with an input"):
        call(**given)


PLAIN: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (linear, {"x": X, "weight": Y, "out": zeros(4, 8)}, "the weight"),
    (linear, {"x": X, "weight": SQUARE, "bias": zeros(8), "out": zeros(4, 8)}, "the bias"),
    (linear_dx, {"dy": X, "weight": Y, "out": zeros(4, 8)}, "the weight"),
    (wgrad, {"dy": X, "x": X, "weight": Y}, "what gradients are added to"),
    (wgrad, {"dy": X, "x": X, "weight": SQUARE, "bias": zeros(8)}, "the bias"),
    (grouped_linear, GROUPED | {"weight": zeros(3, 8, 4)}, "the weight"),
    (grouped_wgrad, {"dy": X, "x": X, "offsets": OFFSETS, "weight": Y}, "what gradients are added to"),
    (gather, {"peers": Y, "out": zeros(8, 8)}, "peers"),
    (scatter, {"gradient": zeros(8, 8), "peers": Y}, "what gradients are added to"),
    (embedding, {"ids": IDS, "weight": Y, "out": zeros(4, 8)}, "the weight"),
    (embedding_grad, {"ids": IDS, "weight": Y, "dy": zeros(4, 8)}, "the weight"),
    (linear_cross_entropy, HEAD | {"weight": zeros(8, 3)}, "the weight"),
    (
        linear_cross_entropy_grad,
        HEAD | {"output": OUTPUT, "g_logp": zeros(4), "gradient": zeros(8, 3), "dh": zeros(4, 3)},
        "the gradient",
    ),
    (
        linear_divergence,
        {
            "student": HeadInput(h=zeros(4, 3), weight=zeros(8, 3)),
            "teacher": HeadInput(h=zeros(4, 3), weight=W),
            "beta": 0.5,
        },
        "the student's weight",
    ),
    (pull, {"peers": Y, "staged": STAGED}, "the sharded weight"),
    (StagedWeight.of, {"peers": Y}, "the weight"),
    (QkvWeights, WEIGHTS | {"wq": zeros(HEADS * D, K)}, "wq"),
    (QkvWeights, WEIGHTS | {"wv": zeros(KV_HEADS * D, K)}, "wv"),
    (qkv_grad, QKV | {"dq": Q, "dk": KV, "dv": KV, "out": QkvGradients(wq=zeros(HEADS * D, K))}, "out.wq"),
]


@pytest.mark.parametrize(("call", "given", "name"), PLAIN)
def test_it_refuses_a_plain_tensor_as_shards(call: Callable[..., Any], given: dict[str, Any], name: str) -> None:
    with pytest.raises(TypeError, match=f"^{name} is a plain tensor; give PeerShards: .*local.*of.*symmetric"):
        call(**given)


def test_an_expanded_input_is_not_where_its_size_says() -> None:
    """As the gradient of a sum is, in memory that ends where the output begins."""
    memory = zeros(64)
    g, dh = memory[15:16].expand(4), memory[16:28].view(4, 3)
    check_apart("dh", dh, g)
    with pytest.raises(ValueError, match="dh shares memory"):
        check_apart("dh", dh, memory[15:19])


def test_it_refuses_the_cpu_without_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ValueError, match="on a CPU kernels run in Triton's interpreter only: set TRITON_INTERPRET=1"):
        linear(x=zeros(2, 3), weight=W, out=zeros(2, 8))
