"""Inputs of the q, k, v kernels (qkv.py, qkv_grad.py), and their checks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .peers import COMPUTE_DTYPES, PeerShards, check_alike, check_bias, check_matrix, check_tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class QkvWeights:
    """The weights of a layer.

    wq: [Hq D, K].
    wk, wv: [Hkv D, K].
    bq, bk, bv: [Hq D], [Hkv D], [Hkv D]: all three or none.

    Raises ValueError if shapes, dtypes, devices, worlds or ranks don't match.
    """

    wq: PeerShards
    wk: PeerShards
    wv: PeerShards
    bq: PeerShards | None = None
    bk: PeerShards | None = None
    bv: PeerShards | None = None

    def __post_init__(self) -> None:
        for name, weight in (("wq", self.wq), ("wk", self.wk), ("wv", self.wv)):
            check_matrix(weight, name)
            if 0 in weight.shape:
                raise ValueError(f"{name} is {weight.shape}; give [heads x head_dim, K], none of them 0")
            shape = (self.wk.shape[0] if name == "wv" else weight.shape[0], self.wq.shape[1])
            check_alike(name, weight, "wq", self.wq, shape=shape, dtype=self.wq.dtype)
        given = [bias is not None for bias in (self.bq, self.bk, self.bv)]
        if any(given) and not all(given):
            raise ValueError(f"only some of bq, bk, bv are given ({given}); give all three (zeros will do) or none")
        if self.bq is not None:
            for bias, weight in ((self.bq, self.wq), (self.bk, self.wk), (self.bv, self.wv)):
                check_bias(bias, weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class QkNorm:
    """RMSNorm over each head of q and of k, between bias and RoPE (Qwen3).

    q_weight, k_weight: [D], local tensors.
    eps: is added to the mean square.
    """

    q_weight: torch.Tensor
    k_weight: torch.Tensor
    eps: float

    def __post_init__(self) -> None:
        for name, weight in (("q_weight", self.q_weight), ("k_weight", self.k_weight)):
            of = {"shape": (weight.numel(),), "dtype": COMPUTE_DTYPES, "device": self.q_weight.device}
            check_tensor(name, weight, **of)
        if not self.eps > 0:
            raise ValueError(f"eps is {self.eps}; a head of zeros needs it above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """The tables of a rotary embedding, and the tokens' rows in them.

    cos, sin: [P, D] as transformers' rotary embeddings make them; only the first of their equal halves is read.
    positions: int64 [T], from 0 in each packed sequence. One outside 0..P-1 makes its token's q and k NaN (a check on
        the host would wait for the device). A model's `position_embeddings` are already the tables' rows: then
        positions count from 0 to T-1.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    positions: torch.Tensor

    def __post_init__(self) -> None:
        cos, positions = self.cos, self.positions
        if cos.ndim != 2 or positions.ndim != 1:
            raise ValueError(f"cos is {tuple(cos.shape)} and positions {tuple(positions.shape)}; give [P, D] and [T]")
        check_tensor("cos", cos, shape=tuple(cos.shape), dtype=COMPUTE_DTYPES, device=cos.device)
        check_tensor("sin", self.sin, shape=tuple(cos.shape), dtype=cos.dtype, device=cos.device)
        check_tensor("positions", positions, shape=tuple(positions.shape), dtype=torch.int64, device=cos.device)


def check_qkv(
    x: torch.Tensor,
    weights: QkvWeights,
    rope: Rope,
    norm: QkNorm | None,
    heads: dict[str, torch.Tensor],
    saved: dict[str, torch.Tensor | None],
) -> None:
    """Raises ValueError unless x, three head tensors (q, k, v or their gradients) and the saved tensors match."""
    alike = {"dtype": weights.wq.dtype, "device": weights.wq.device}
    check_tensor("x", x, shape=(*x.shape[:1], weights.wq.shape[1]), **alike)
    (first_name, first), *_ = heads.items()
    if first.ndim != 3:
        raise ValueError(f"{first_name} is {tuple(first.shape)}; give [T, heads, head_dim]")
    head_dim = first.shape[2]
    if head_dim not in (16, 32, 64, 128, 256):
        raise ValueError(
            f"head_dim is {head_dim}; this kernel takes 16, 32, 64, 128 or 256: leave this layer as it is (fully_shard "
            f"gathers its weights whole) instead of replacing it"
        )
    for (name, value), weight in zip(heads.items(), (weights.wq, weights.wk, weights.wv), strict=True):
        if weight.shape[0] % head_dim:
            raise ValueError(f"a weight has {weight.shape[0]} rows, which are not whole heads of {head_dim}")
        check_tensor(name, value, shape=(len(x), weight.shape[0] // head_dim, head_dim), **alike)
    absent = {value is None for value in saved.values()}
    if len(absent) > 1 or (norm is None and absent == {False}):
        raise ValueError(f"{' and '.join(saved)} go together, and with a norm only; give both or none")
    for (name, value), like in zip(saved.items(), heads.values(), strict=False):
        if value is not None:
            check_tensor(name, value, shape=tuple(like.shape), **alike)
    if rope.cos.shape[1] < head_dim:
        raise ValueError(
            f"cos has {rope.cos.shape[1]} columns and head_dim is {head_dim}: a partial rotary embedding, which this "
            f"kernel doesn't have; leave this layer as it is instead of replacing it"
        )
    check_tensor("cos", rope.cos, shape=(len(rope.cos), head_dim), dtype=COMPUTE_DTYPES, device=x.device)
    check_tensor("positions", rope.positions, shape=(len(x),), dtype=torch.int64, device=x.device)
    if norm is not None:
        for name, value in (("q_weight", norm.q_weight), ("k_weight", norm.k_weight)):
            check_tensor(name, value, shape=(head_dim,), dtype=COMPUTE_DTYPES, device=x.device)
