from __future__ import annotations

from collections.abc import Iterator

import torch

from odc_kernels import qkv, qkv_grad, tiles

from .case import TYPES, Case

_TABLES = {"wq_table": "*i64", "wk_table": "*i64", "wv_table": "*i64"}
_BIASES = {"bq_table": "*i64", "bk_table": "*i64", "bv_table": "*i64"}
_PEERS = {"q_rows_per_owner": "i32", "kv_rows_per_owner": "i32", "rank": "i32", "world": "i32"}
_HEADS = {"tokens": "i32", "q_heads": "i32", "kv_heads": "i32", "table_rows": "i32"}
_ROPE = {"cos": "*fp32", "sin": "*fp32", "positions": "*i64"}
_TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_MANY_TOKENS = 4096


def cases() -> Iterator[Case]:
    for dtype in ("bf16", "fp16", "fp32"):
        few_and_many = ((64, "few"), (_MANY_TOKENS, "many")) if dtype != "fp32" else ((_MANY_TOKENS, "any"),)
        for tokens, word in few_and_many:
            for head_dim in (64, 128, 256):
                yield _forward(dtype, head_dim, tokens, word)
            yield _dx(dtype, tokens, word)
        for head_dim in (64, 128, 256):
            yield _undo(dtype, head_dim)


def _forward(dtype: str, head_dim: int, tokens: int, word: str) -> Case:
    operator = "qkv" if head_dim <= 128 else "qkv_wide"
    tile = tiles.tile_of(operator, element_bytes=_TORCH[dtype].itemsize, arch=90, tokens=tokens)  # the same for all
    names = ("x", "q_norm", "k_norm", "q", "k", "v", "q_pre", "k_pre")
    data = dict.fromkeys(names, f"*{dtype}")
    vector = 16 // _TORCH[dtype].itemsize
    flags = {"VECTOR": vector, "RUN": vector, "HAS_BIAS": True, "HAS_NORM": True, "SAVE": True, "UPCAST": False}
    blocks = {"HEAD_DIM": head_dim, "BLOCK_T": tile.t, "BLOCK_K": tile.k, "GROUP": tile.group}
    return Case(
        name=f"qkv {dtype} heads of {head_dim}, {word} tokens",
        kernel=qkv.qkv_kernel,
        signature={**data, **_TABLES, **_BIASES, **_ROPE, **_HEADS, **_PEERS, "columns": "i32", "eps": "fp32"},
        constants={"DTYPE": TYPES[dtype], **flags, **blocks},
        # The number of columns is known to be a multiple of VECTOR only, and not of 16.
        aligned=(*data, *_TABLES, *_BIASES, *_ROPE, "q_rows_per_owner", "kv_rows_per_owner"),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        matrix=dtype != "fp32",
    )


def _undo(dtype: str, head_dim: int) -> Case:
    names = ("dq", "dk", "q_pre", "k_pre", "q_norm", "k_norm", "dq_pre", "dk_pre")
    data = {**dict.fromkeys(names, f"*{dtype}"), "dq_norm_parts": "*fp32", "dk_norm_parts": "*fp32"}
    return Case(
        name=f"qkv undo {dtype} heads of {head_dim}",
        kernel=qkv_grad.qk_undo_kernel,
        signature={**data, **_ROPE, **_HEADS, "eps": "fp32"},
        constants={"HAS_NORM": True, "HEAD_DIM": head_dim, "BLOCK_T": 32},
        aligned=(*data, *_ROPE),
        num_warps=qkv_grad.UNDO_WARPS,
    )


def _dx(dtype: str, tokens: int, word: str) -> Case:
    tile = tiles.tile_of("qkv_dx", element_bytes=_TORCH[dtype].itemsize, arch=90, tokens=tokens)
    data = dict.fromkeys(("dq_pre", "dk_pre", "dv", "dx"), f"*{dtype}")
    sizes = {"tokens": "i32", "columns": "i32", "q_rows": "i32", "kv_rows": "i32"}
    blocks = {"BLOCK_T": tile.t, "BLOCK_N": tile.n, "BLOCK_K": tile.k, "UPCAST": False}
    return Case(
        name=f"qkv dx {dtype}, {word} tokens",
        kernel=qkv_grad.qkv_dx_kernel,
        signature={**data, **_TABLES, **sizes, **_PEERS},
        constants={"DTYPE": TYPES[dtype], "VECTOR": 16 // _TORCH[dtype].itemsize, **blocks},
        aligned=(*data, *_TABLES, "q_rows", "kv_rows", "q_rows_per_owner", "kv_rows_per_owner"),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        matrix=dtype != "fp32",
    )
