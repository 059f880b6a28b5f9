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
    experts_wgrad,
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
# The kernels' arguments by type; "*": pointers to the case's dtype.
_ARGUMENTS = {
    "i32": "rows rows_per_owner columns row_elements rank world tokens count first stride stride_teacher place value "
    "ranks number epoch spins shift padding vocabulary ignore_index experts experts_per_owner outputs inputs q_rows "
    "kv_rows q_rows_per_owner kv_rows_per_owner q_heads kv_heads table_rows",
    "fp32": "scale scale_teacher log_share log_share_teacher factor eps limit alpha",
    "*i64": "table w_table b_table wq_table wk_table wv_table bq_table bk_table bv_table sources offsets counts ids "
    "order begins ends targets positions",
    "*i32": "stop status flags largest",
    "*fp32": "partial maximum total moment picked lse lse_teacher entropy g_logp g_entropy theirs own cos sin "
    "dq_norm_parts dk_norm_parts",
    "*": "x dy y w dx out gradient pre logits student teacher q k v dq dk dv q_norm k_norm q_pre k_pre dq_pre dk_pre",
}
_TYPE_OF = {name: kind for kind, names in _ARGUMENTS.items() for name in names.split()}
# Sizes that are multiples of 16 in a model; a launch tells those that are specialised.
_ALIGNED = {
    "rows",
    "rows_per_owner",
    "columns",
    "row_elements",
    "count",
    "stride",
    "stride_teacher",
    "outputs",
    "inputs",
}
_ALIGNED |= {"q_rows", "kv_rows", "q_rows_per_owner", "kv_rows_per_owner"}


def _case(
    name: str,
    kernel: Any,
    dtype: str,
    constants: dict[str, Any],
    *,
    tile: Any = None,
    types: dict[str, str] | None = None,
    unaligned: tuple[str, ...] = (),
    **options: Any,
) -> Case:
    """`tile`: whose warps and stages are the launch's. `types`: of arguments that have another one here. All pointers
    but those `unaligned` are aligned.
    """
    arguments = [each for each in kernel.arg_names if each not in constants | options.get("by_arch", {})]
    known = _TYPE_OF | (types or {})
    signature = {each: f"*{dtype}" if known[each] == "*" else known[each] for each in arguments if each in known}
    untold = {each.name for each in getattr(kernel, "params", ()) if each.do_not_specialize}.union(unaligned)
    may_be = {each for each, kind in signature.items() if kind[0] == "*" or each in _ALIGNED}
    aligned = tuple(each for each in signature if each in may_be - untold)
    launch = {key: getattr(tile, key) for key in ("num_warps", "num_stages") if hasattr(tile, key)}
    return Case(
        name=name, kernel=kernel, signature=signature, constants=constants, aligned=aligned, **launch, **options
    )


def _adding(name: str, *given: Any, constants: dict[str, Any], exact: bool, **options: Any) -> Case:
    """A kernel that adds to sums in fp32, or to exact ones."""
    constants = constants if exact else constants | {"largest": None}
    return _case("exact " * exact + name, *given, constants=constants, reduces=True, **options)


def cases() -> Iterator[Case]:
    yield from _of_memory()
    yield from _of_flags()
    yield from _of_embedding()
    yield from _of_head()
    for dtype in TYPES:
        yield from _of_linear(dtype)
        yield from _of_staged(dtype)
        yield from _wgrads("wgrad", dtype, wgrad.wgrad_kernel)
        yield from _of_experts(dtype)
        yield from _of_qkv(dtype)


def _bytes(dtype: str) -> int:
    return TYPES[dtype].primitive_bitwidth // 8


def _of_memory() -> Iterator[Case]:
    for source, target in (("fp32", "fp32"), ("fp32", "bf16"), ("bf16", "bf16"), ("fp16", "fp16")):
        blocks = {"DTYPE": TYPES[source], "ALIGNED": True, "BLOCK": 4096}
        yield _case(f"gather {source} to {target}", gather.gather_kernel, target, blocks, flat=True)
    for dtype, even in (("fp32", 4), ("bf16", 8)):
        blocks = {"DTYPE": TYPES[dtype], "EVEN": even, "BLOCK": 2048}
        yield _case(f"gather_many {dtype}", gather.gather_many_kernel, dtype, blocks)
    for dtype in TYPES:
        for exact in (False, True):
            options = {"constants": {"ALIGNED": True, "BLOCK": 2048}, "exact": exact, "flat": True}
            yield _adding(f"scatter {dtype}", scatter.scatter_kernel, dtype, **options)
    for target, dtype in (*(("fp32", dtype) for dtype in TYPES), ("u64", "u64")):
        types, kernel = {"target": f"*{target}", "source": f"*{dtype}"}, scatter.add_block_kernel
        yield _case(f"add_block {dtype}", kernel, dtype, {"BLOCK": 2048}, types=types, reduces=True, flat=True)


def _of_flags() -> Iterator[Case]:
    writes, reads = "atom.global.sys.release.exch.b64", "ld.global.sys.acquire.b64"
    yield _case("set_flags", flags.set_flags_kernel, "", {}, num_warps=1, flags=writes)
    types = {"flags": "*i64"}
    yield _case("await_flags", flags.await_flags_kernel, "", {}, types=types, num_warps=1, flags=reads)


def _of_embedding() -> Iterator[Case]:
    tile, grad_tile = embedding.EMBEDDING, embedding.EMBEDDING_GRAD
    blocks = {"SEGMENT": grad_tile.segment, "BLOCK_T": grad_tile.t, "BLOCK_K": grad_tile.k}
    adding = partial(_adding, constants=blocks, tile=grad_tile)
    for dtype in TYPES:
        copied = {"DTYPE": TYPES[dtype], "BLOCK_K": tile.k}
        yield _case(f"embedding {dtype}", embedding.embedding_kernel, dtype, copied, tile=tile)
        for exact in (False, True):
            yield adding(f"embedding_grad {dtype}", embedding.embedding_grad_kernel, dtype, exact=exact)
    for exact in (False, True):
        yield adding("embedding_grad_long", embedding.embedding_grad_long_kernel, "", exact=exact)


def _of_head() -> Iterator[Case]:
    tile, wide = tiles.ONLINE_SOFTMAX, tiles.DIVERGENCE
    blocks, of_two = {"BLOCK_T": tile.t, "BLOCK_V": tile.v}, {"BLOCK_T": wide.t, "BLOCK_V": wide.v}
    for dtype in TYPES:
        name = "linear_cross_entropy"
        yield _case(f"{name} softmax {dtype}", online_softmax.online_softmax_kernel, dtype, blocks, tile=tile)
        given = {"HAS_ENTROPY": True, **blocks}
        yield _case(f"{name} dz {dtype}", online_softmax.softmax_grad_kernel, dtype, given, tile=tile)
        for is_grad in (False, True):
            given = {"IS_GRAD": is_grad, "IS_FORWARD_KL": False, **of_two}
            name = f"linear_divergence {'dz' if is_grad else 'sums'} {dtype}"
            yield _case(name, linear_divergence.divergence_kernel, dtype, given, tile=wide)


def _tiled(operator: str, dtype: str, tokens: int) -> dict[str, Any]:
    """The options of a kernel whose tile is the same on all architectures, and its blocks as `constants`."""
    tile = tiles.tile_of(operator, element_bytes=_bytes(dtype), arch=90, tokens=tokens)
    blocks = {"BLOCK_T": tile.t, "BLOCK_K": tile.k, "UPCAST": False, "DTYPE": TYPES[dtype]}
    blocks |= {"BLOCK_N": tile.n} if hasattr(tile, "n") else {"GROUP": tile.group}
    return {"constants": blocks, "tile": tile, "matrix": dtype != "fp32"}


def _of_linear(dtype: str) -> Iterator[Case]:
    for tokens in (64, 256) if dtype != "fp32" else (64,):
        few = "" if tokens > 64 else " T<=64"
        options = _tiled("linear", dtype, tokens)
        options["constants"]["HAS_BIAS"] = True
        yield _case(f"linear {dtype}{few}", linear.linear_kernel, dtype, **options)
        yield _case(f"linear_dx {dtype}{few}", linear.linear_dx_kernel, dtype, **_tiled("linear_dx", dtype, tokens))


def _staged_blocks(operator: str, dtype: str) -> dict[str, Callable[[int], int]]:
    def tile(arch: int) -> tiles.LinearTile:
        return tiles.tile_of(operator, element_bytes=_bytes(dtype), arch=arch, tokens=4096)

    fields = {"BLOCK_T": "t", "BLOCK_N": "n", "BLOCK_K": "k", "GROUP": "group", "STAGES": "num_stages"}
    return {name: lambda arch, field=field: getattr(tile(arch), field) for name, field in fields.items()}


def _of_staged(dtype: str) -> Iterator[Case]:
    staged = partial(_case, dtype=dtype, num_warps=8, matrix=dtype != "fp32", waits=True)
    common, bulk = {"DTYPE": TYPES[dtype], "UPCAST": False}, {"BULK": lambda arch: arch >= 90}
    # Owners' rows that are not a multiple of a tile are written through pointers.
    for name, whole in ((f"staged {dtype}", True), (f"staged {dtype} ragged", False)):
        out = {"BULK_OUT": lambda arch, whole=whole: whole and arch >= 90}
        by_arch = {**bulk, **out, **_staged_blocks("linear_staged", dtype)}
        kernel = linear_staged.linear_staged_kernel
        yield staged(name, kernel, constants={"HAS_BIAS": True, **common}, by_arch=by_arch)
    by_arch = {**bulk, **_staged_blocks("linear_dx_staged", dtype)}
    yield staged(f"staged_dx {dtype}", linear_staged.linear_dx_staged_kernel, constants=common, by_arch=by_arch)


def _wgrads(name: str, dtype: str, kernel: Any, **options: Any) -> Iterator[Case]:
    tile = tiles.WGRAD_FP32 if dtype == "fp32" else tiles.WGRAD
    blocks = {"UPCAST": False, "BLOCK_N": tile.n, "BLOCK_T": tile.t, "GROUP": tile.group}
    for far, exact in product((False, True), repeat=2):

        def bulk(arch: int, far: bool = far) -> bool:
            return arch >= 90 and not far

        def columns(arch: int, bulk: Callable[[int], bool] = bulk, exact: bool = exact) -> int:
            return (tiles.of_integers(tile, arch=arch, bulk=bulk(arch)) if exact else tile).k

        yield _adding(
            f"{name} {dtype}{' far' * far}",
            kernel,
            dtype,
            constants=blocks,
            exact=exact,
            tile=tile,
            by_arch={"BULK": bulk, "BLOCK_K": columns},
            matrix=dtype != "fp32",
            far=far,
            **options,
        )


def _of_experts(dtype: str) -> Iterator[Case]:
    # The offsets of some of the experts may begin anywhere.
    where: dict[str, Any] = {"types": {"offsets": "*i32"}, "unaligned": ("offsets",)}
    averages = (64, 256) if dtype != "fp32" else (64,)
    for tokens, transposed, gate in product(averages, (False, True), ("", " gate", " interleaved")):
        options = _tiled("grouped_linear", dtype, tokens)
        flags = {"TRANSPOSED": transposed, "HAS_GATE": bool(gate), "INTERLEAVED": gate == " interleaved"}
        options["constants"] |= {"BLOCK_E": 128, "GROUP": 8, **flags, **({} if gate else {"pre": None, "limit": None})}
        name = f"grouped_linear {dtype}{' transposed' * transposed}{gate}{' T<=64' * (tokens <= 64)}"
        yield _case(name, experts.grouped_linear_kernel, dtype, **where, **options)
    blocks = {"BLOCK_S": experts_wgrad.BIAS_BLOCK_S, "BLOCK_N": experts_wgrad.BIAS_BLOCK_N}
    for exact in (False, True):
        kernel = experts_wgrad.grouped_bias_grad_kernel
        yield _adding(f"grouped_bias_grad {dtype}", kernel, dtype, constants=blocks, exact=exact, **where)
    yield from _wgrads("grouped_wgrad", dtype, experts_wgrad.grouped_wgrad_kernel, **where)


def _of_qkv(dtype: str) -> Iterator[Case]:
    # The number of columns is only known to be a multiple of VECTOR, not of 16.
    vector, where = 16 // _bytes(dtype), {"unaligned": ("columns",)}
    flags = {"VECTOR": vector, "RUN": vector, "HAS_BIAS": True, "HAS_NORM": True, "SAVE": True}
    for tokens, word in ((64, "few"), (4096, "many")) if dtype != "fp32" else ((4096, "any"),):
        for head_dim in (64, 128, 256):
            options = _tiled("qkv" if head_dim <= 128 else "qkv_wide", dtype, tokens)
            options["constants"] |= {"HEAD_DIM": head_dim, **flags}
            name = f"qkv {dtype} heads of {head_dim}, {word} tokens"
            yield _case(name, qkv.qkv_kernel, dtype, **where, **options)
        options = _tiled("qkv_dx", dtype, tokens)
        options["constants"]["VECTOR"] = vector
        yield _case(f"qkv dx {dtype}, {word} tokens", qkv_grad.qkv_dx_kernel, dtype, **where, **options)
    for head_dim in (64, 128, 256):
        blocks, name = {"HAS_NORM": True, "HEAD_DIM": head_dim, "BLOCK_T": 32}, f"qkv undo {dtype} heads of {head_dim}"
        yield _case(name, qkv_grad.qk_undo_kernel, dtype, blocks, num_warps=qkv_grad.UNDO_WARPS)
