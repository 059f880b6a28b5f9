"""What `bench.kernels.aot` compiles: every kernel, by every default configuration and dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import triton.language as tl

from odc_kernels import (
    embedding,
    experts,
    flags,
    gather,
    linear,
    linear_divergence,
    linear_staged,
    online_softmax,
    qkv,
    qkv_grad,
    scatter,
    tiles,
    wgrad,
)

from .code import Case

TYPES = {"fp32": tl.float32, "bf16": tl.bfloat16, "fp16": tl.float16}
_SIZES = {"rows": "i32", "rows_per_owner": "i32", "columns": "i32"}
_MATRIX = {"tokens": "i32", **_SIZES, "rank": "i32", "world": "i32"}
_ALIGNED_SIZES = ("rows", "rows_per_owner", "columns")


def cases() -> Iterator[Case]:
    yield from _of_memory()
    yield from _of_flags()
    yield from _of_embedding()
    yield from _of_head()
    yield from _of_divergence()
    for dtype in TYPES:
        yield from _of_linear(dtype)
        yield from _of_staged(dtype)
        yield from _of_wgrad(dtype)
        yield from _of_experts(dtype)
        yield from _of_qkv(dtype)


def _bytes(dtype: str) -> int:
    return TYPES[dtype].primitive_bitwidth // 8


def _adding(name: str, *, exact: bool, signature: dict[str, str], constants: dict[str, Any]) -> dict[str, Any]:
    """These options of a kernel that adds to sums in fp32, or to exact ones."""
    signature = {**signature, "factor": "fp32", **({"largest": "*i32"} if exact else {})}
    constants = constants if exact else {**constants, "largest": None}
    return {"name": "exact " * exact + name, "signature": signature, "constants": constants, "reduces": True}


def _of_memory() -> Iterator[Case]:
    sizes = {"rows": "i32", "rows_per_owner": "i32", "row_elements": "i32", "rank": "i32", "world": "i32"}
    for source, target in (("fp32", "fp32"), ("fp32", "bf16"), ("bf16", "bf16"), ("fp16", "fp16")):
        yield Case(
            name=f"gather {source} to {target}",
            kernel=gather.gather_kernel,
            signature={"table": "*i64", "out": f"*{target}", **sizes},
            constants={"DTYPE": TYPES[source], "ALIGNED": True, "BLOCK": 4096},
            aligned=("table", "out", "rows_per_owner", "row_elements"),
            flat=True,
        )
    for dtype, even in (("fp32", 4), ("bf16", 8)):
        listed = {"sources": "*i64", "offsets": "*i64", "counts": "*i64", "out": f"*{dtype}"}
        yield Case(
            name=f"gather_many {dtype}",
            kernel=gather.gather_many_kernel,
            signature=listed,
            constants={"DTYPE": TYPES[dtype], "EVEN": even, "BLOCK": 2048},
            aligned=tuple(listed),
        )
    for dtype in TYPES:
        for exact in (False, True):
            given = {"table": "*i64", "gradient": f"*{dtype}", "scale": "fp32", **sizes}
            yield Case(
                **_adding(f"scatter {dtype}", exact=exact, signature=given, constants={"ALIGNED": True, "BLOCK": 2048}),
                kernel=scatter.scatter_kernel,
                aligned=("table", "gradient", "rows_per_owner", "row_elements"),
                flat=True,
            )
    for target, dtype in (*(("fp32", dtype) for dtype in TYPES), ("u64", "u64")):
        yield Case(
            name=f"add_block {dtype}",
            kernel=scatter.add_block_kernel,
            signature={"target": f"*{target}", "source": f"*{dtype}", "count": "i32"},
            constants={"BLOCK": 2048},
            aligned=("target", "source", "count"),
            reduces=True,
            flat=True,
        )


def _of_flags() -> Iterator[Case]:
    where = {"place": "i32", "value": "i32", "first": "i32", "ranks": "i32"}
    yield Case(
        name="set_flags",
        kernel=flags.set_flags_kernel,
        signature={"table": "*i64", **where},
        constants={},
        num_warps=1,
        flags="atom.global.sys.release.exch.b64",
    )
    yield Case(
        name="await_flags",
        kernel=flags.await_flags_kernel,
        signature={"flags": "*i64", "stop": "*i32", "status": "*i32", "stride": "i32"}
        | where
        | {"number": "i32", "spins": "i32"},
        constants={},
        num_warps=1,
        flags="ld.global.sys.acquire.b64",
    )


def _of_embedding() -> Iterator[Case]:
    tile, grad_tile = embedding.EMBEDDING, embedding.EMBEDDING_GRAD
    runs = {"ids": "*i64", "begins": "*i64", "ends": "*i64", "table": "*i64", "partial": "*fp32"}
    sizes = {"scale": "fp32", "tokens": "i32", **_SIZES, "padding": "i32"}
    blocks = {"SEGMENT": grad_tile.segment, "BLOCK_T": grad_tile.t, "BLOCK_K": grad_tile.k}
    adding = partial(_adding, constants=blocks)
    for dtype in TYPES:
        yield Case(
            name=f"embedding {dtype}",
            kernel=embedding.embedding_kernel,
            signature={"ids": "*i64", "table": "*i64", "out": f"*{dtype}", **_SIZES},
            constants={"DTYPE": TYPES[dtype], "BLOCK_K": tile.k},
            aligned=("ids", "table", "out", "columns"),
            num_warps=tile.num_warps,
        )
        for exact in (False, True):
            given = {"dy": f"*{dtype}", "order": "*i64", "shift": "i32", **runs, **sizes}
            yield Case(
                **adding(f"embedding_grad {dtype}", exact=exact, signature=given),
                kernel=embedding.embedding_grad_kernel,
                aligned=("dy", "order", *runs, "columns"),
                num_warps=grad_tile.num_warps,
            )
    for exact in (False, True):
        yield Case(
            **adding("embedding_grad_long", exact=exact, signature={**runs, **sizes}),
            kernel=embedding.embedding_grad_long_kernel,
            aligned=(*runs, "columns"),
            num_warps=grad_tile.num_warps,
        )


def _of_head() -> Iterator[Case]:
    tile = online_softmax.ONLINE_SOFTMAX
    sizes = {"scale": "fp32", "tokens": "i32", "stride": "i32", "count": "i32", "first": "i32"}
    running = dict.fromkeys(("maximum", "total", "moment", "picked"), "*fp32")
    given = dict.fromkeys(("lse", "entropy", "g_logp", "g_entropy"), "*fp32")
    blocks = {"BLOCK_T": tile.t, "BLOCK_V": tile.v}
    for dtype in TYPES:
        data = {"logits": f"*{dtype}", "targets": "*i64"}
        yield Case(
            name=f"linear_cross_entropy softmax {dtype}",
            kernel=online_softmax.online_softmax_kernel,
            signature={**data, **running, **sizes},
            constants=blocks,
            aligned=("logits", "targets", *running, "stride"),
            num_warps=tile.num_warps,
        )
        yield Case(
            name=f"linear_cross_entropy dz {dtype}",
            kernel=online_softmax.softmax_grad_kernel,
            signature={**data, **given, **sizes, "vocabulary": "i32", "ignore_index": "i32"},
            constants={"HAS_ENTROPY": True, **blocks},
            aligned=("logits", "targets", *given, "stride"),
            num_warps=tile.num_warps,
        )


def _of_divergence() -> Iterator[Case]:
    tile = tiles.DIVERGENCE
    sums = dict.fromkeys(("lse", "lse_teacher", "theirs", "own"), "*fp32")
    numbers = dict.fromkeys(("scale", "scale_teacher", "log_share", "log_share_teacher"), "fp32")
    sizes = dict.fromkeys(("tokens", "stride", "stride_teacher", "count"), "i32")
    for dtype, is_grad in product(TYPES, (False, True)):
        data = {"student": f"*{dtype}", "teacher": f"*{dtype}"}
        yield Case(
            name=f"linear_divergence {'dz' if is_grad else 'sums'} {dtype}",
            kernel=linear_divergence.divergence_kernel,
            signature={**data, **sums, **numbers, **sizes},
            constants={"IS_GRAD": is_grad, "IS_FORWARD_KL": False, "BLOCK_T": tile.t, "BLOCK_V": tile.v},
            aligned=(*data, *sums, "stride", "stride_teacher"),
            num_warps=tile.num_warps,
        )


def _tiled(operator: str, dtype: str, tokens: int) -> dict[str, Any]:
    """The options of a kernel whose tile is the same on all architectures, and its blocks as `constants`."""
    tile = tiles.tile_of(operator, element_bytes=_bytes(dtype), arch=90, tokens=tokens)
    blocks = {"BLOCK_T": tile.t, "BLOCK_N": tile.n, "BLOCK_K": tile.k, "UPCAST": False, "DTYPE": TYPES[dtype]}
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "matrix": dtype != "fp32"}
    return {"constants": blocks, **options}


def _of_linear(dtype: str) -> Iterator[Case]:
    for tokens in (64, 256) if dtype != "fp32" else (64,):
        few = "" if tokens > 64 else " T<=64"
        options = _tiled("linear", dtype, tokens)
        options["constants"]["HAS_BIAS"] = True
        data = {"x": f"*{dtype}", "w_table": "*i64", "b_table": "*i64", "y": f"*{dtype}"}
        yield Case(
            name=f"linear {dtype}{few}",
            kernel=linear.linear_kernel,
            signature={**data, **_MATRIX},
            aligned=(*data, *_ALIGNED_SIZES),
            **options,
        )
        data = {"dy": f"*{dtype}", "w_table": "*i64", "dx": f"*{dtype}"}
        yield Case(
            name=f"linear_dx {dtype}{few}",
            kernel=linear.linear_dx_kernel,
            signature={**data, **_MATRIX},
            aligned=(*data, *_ALIGNED_SIZES),
            **_tiled("linear_dx", dtype, tokens),
        )


def _staged_blocks(operator: str, dtype: str) -> dict[str, Callable[[int], int]]:
    def tile(arch: int) -> tiles.LinearTile:
        return tiles.tile_of(operator, element_bytes=_bytes(dtype), arch=arch, tokens=4096)

    fields = {"BLOCK_T": "t", "BLOCK_N": "n", "BLOCK_K": "k", "GROUP": "group", "STAGES": "num_stages"}
    return {name: lambda arch, field=field: getattr(tile(arch), field) for name, field in fields.items()}


def _of_staged(dtype: str) -> Iterator[Case]:
    wait = {"flags": "*i32", "status": "*i32", "epoch": "i32", "spins": "i32", **_MATRIX}
    staged = partial(Case, num_warps=8, matrix=dtype != "fp32", waits=True)
    pointer, common, sizes = f"*{dtype}", {"DTYPE": TYPES[dtype], "UPCAST": False}, ("flags", "status", *_ALIGNED_SIZES)
    bulk = {"BULK": lambda arch: arch >= 90}
    # Owners' rows that are not a multiple of a tile are written through pointers.
    for name, whole in ((f"staged {dtype}", True), (f"staged {dtype} ragged", False)):
        data = {"x": pointer, "w": pointer, "b_table": "*i64", "y": pointer}
        out = {"BULK_OUT": lambda arch, whole=whole: whole and arch >= 90}
        yield staged(
            name=name,
            kernel=linear_staged.linear_staged_kernel,
            signature={**data, **wait},
            constants={"HAS_BIAS": True, **common},
            by_arch={**bulk, **out, **_staged_blocks("linear_staged", dtype)},
            aligned=(*data, *sizes),
        )
    data = {"dy": pointer, "w": pointer, "dx": pointer}
    yield staged(
        name=f"staged_dx {dtype}",
        kernel=linear_staged.linear_dx_staged_kernel,
        signature={**data, **wait},
        constants=common,
        by_arch={**bulk, **_staged_blocks("linear_dx_staged", dtype)},
        aligned=(*data, *sizes),
    )


def _of_wgrad(dtype: str) -> Iterator[Case]:
    given = {"dy": f"*{dtype}", "x": f"*{dtype}", "w_table": "*i64", "scale": "fp32", **_MATRIX}
    yield from _wgrads("wgrad", dtype, wgrad.wgrad_kernel, given, _ALIGNED_SIZES)


def _wgrads(name: str, dtype: str, kernel: Any, signature: dict[str, str], aligned: tuple[str, ...]) -> Iterator[Case]:
    tile = tiles.WGRAD_FP32 if dtype == "fp32" else tiles.WGRAD
    blocks = {"UPCAST": False, "BLOCK_N": tile.n, "BLOCK_T": tile.t, "GROUP": tile.group}
    for far, exact in product((False, True), repeat=2):

        def bulk(arch: int, far: bool = far) -> bool:
            return arch >= 90 and not far

        def columns(arch: int, bulk: Callable[[int], bool] = bulk, exact: bool = exact) -> int:
            return (tiles.of_integers(tile, arch=arch, bulk=bulk(arch)) if exact else tile).k

        yield Case(
            **_adding(f"{name} {dtype}{' far' * far}", exact=exact, signature=signature, constants=blocks),
            kernel=kernel,
            by_arch={"BULK": bulk, "BLOCK_K": columns},
            aligned=("dy", "x", "w_table", *aligned),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            matrix=dtype != "fp32",
            far=far,
        )


def _of_experts(dtype: str) -> Iterator[Case]:
    pointer, common = f"*{dtype}", {"offsets": "*i32", "experts": "i32", "experts_per_owner": "i32", "first": "i32"}
    data = {"x": pointer, "w_table": "*i64", "b_table": "*i64", "y": pointer}
    gated = {**data, "pre": pointer}
    averages = (64, 256) if dtype != "fp32" else (64,)
    for tokens, transposed, gate in product(averages, (False, True), ("", " gate", " interleaved")):
        options, given = _tiled("grouped_linear", dtype, tokens), gated if gate else data
        flags = {"TRANSPOSED": transposed, "HAS_GATE": bool(gate), "INTERLEAVED": gate == " interleaved"}
        options["constants"] |= {"BLOCK_E": 128, "GROUP": 8, **flags, **({} if gate else {"pre": None, "limit": None})}
        yield Case(
            name=f"grouped_linear {dtype}{' transposed' * transposed}{gate}{' T<=64' * (tokens <= 64)}",
            kernel=experts.grouped_linear_kernel,
            signature={**given, **common, "outputs": "i32", "inputs": "i32", "alpha": "fp32", "limit": "fp32"},
            aligned=(*given, "outputs", "inputs"),
            **options,
        )
    for exact in (False, True):
        given = {"dy": pointer, "b_table": "*i64", "scale": "fp32", "columns": "i32", **common}
        blocks = {"BLOCK_S": experts.BIAS_BLOCK_S, "BLOCK_N": experts.BIAS_BLOCK_N}
        yield Case(
            **_adding(f"grouped_bias_grad {dtype}", exact=exact, signature=given, constants=blocks),
            kernel=experts.grouped_bias_grad_kernel,
            aligned=("dy", "b_table", "columns"),
        )
    given = {"dy": pointer, "x": pointer, "w_table": "*i64", "scale": "fp32", "rows": "i32", "columns": "i32", **common}
    yield from _wgrads("grouped_wgrad", dtype, experts.grouped_wgrad_kernel, given, ("rows", "columns"))


_TABLES = {"wq_table": "*i64", "wk_table": "*i64", "wv_table": "*i64"}
_BIASES = {"bq_table": "*i64", "bk_table": "*i64", "bv_table": "*i64"}
_PER_OWNER = {"q_rows_per_owner": "i32", "kv_rows_per_owner": "i32"}
_PEERS = {**_PER_OWNER, "rank": "i32", "world": "i32"}
_HEADS = {"tokens": "i32", "q_heads": "i32", "kv_heads": "i32", "table_rows": "i32"}
_ROPE = {"cos": "*fp32", "sin": "*fp32", "positions": "*i64"}


def _of_qkv(dtype: str) -> Iterator[Case]:
    vector = 16 // _bytes(dtype)
    for tokens, word in ((64, "few"), (4096, "many")) if dtype != "fp32" else ((4096, "any"),):
        for head_dim in (64, 128, 256):
            yield _qkv_forward(dtype, head_dim, tokens, word)
        options = _tiled("qkv_dx", dtype, tokens)
        options["constants"]["VECTOR"] = vector
        data = dict.fromkeys(("dq_pre", "dk_pre", "dv", "dx"), f"*{dtype}")
        sizes = {"tokens": "i32", "columns": "i32", "q_rows": "i32", "kv_rows": "i32"}
        yield Case(
            name=f"qkv dx {dtype}, {word} tokens",
            kernel=qkv_grad.qkv_dx_kernel,
            signature={**data, **_TABLES, **sizes, **_PEERS},
            aligned=(*data, *_TABLES, "q_rows", "kv_rows", *_PER_OWNER),
            **options,
        )
    names = ("dq", "dk", "q_pre", "k_pre", "q_norm", "k_norm", "dq_pre", "dk_pre")
    data = {**dict.fromkeys(names, f"*{dtype}"), "dq_norm_parts": "*fp32", "dk_norm_parts": "*fp32"}
    for head_dim in (64, 128, 256):
        yield Case(
            name=f"qkv undo {dtype} heads of {head_dim}",
            kernel=qkv_grad.qk_undo_kernel,
            signature={**data, **_ROPE, **_HEADS, "eps": "fp32"},
            constants={"HAS_NORM": True, "HEAD_DIM": head_dim, "BLOCK_T": 32},
            aligned=(*data, *_ROPE),
            num_warps=qkv_grad.UNDO_WARPS,
        )


def _qkv_forward(dtype: str, head_dim: int, tokens: int, word: str) -> Case:
    operator, vector = "qkv" if head_dim <= 128 else "qkv_wide", 16 // _bytes(dtype)
    tile = tiles.tile_of(operator, element_bytes=_bytes(dtype), arch=90, tokens=tokens)  # the same for all
    data = dict.fromkeys(("x", "q_norm", "k_norm", "q", "k", "v", "q_pre", "k_pre"), f"*{dtype}")
    flags = {"VECTOR": vector, "RUN": vector, "HAS_BIAS": True, "HAS_NORM": True, "SAVE": True, "UPCAST": False}
    blocks = {"HEAD_DIM": head_dim, "BLOCK_T": tile.t, "BLOCK_K": tile.k, "GROUP": tile.group}
    return Case(
        name=f"qkv {dtype} heads of {head_dim}, {word} tokens",
        kernel=qkv.qkv_kernel,
        signature={**data, **_TABLES, **_BIASES, **_ROPE, **_HEADS, **_PEERS, "columns": "i32", "eps": "fp32"},
        constants={"DTYPE": TYPES[dtype], **flags, **blocks},
        # The number of columns is only known to be a multiple of VECTOR, not of 16.
        aligned=(*data, *_TABLES, *_BIASES, *_ROPE, *_PER_OWNER),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        matrix=dtype != "fp32",
    )
