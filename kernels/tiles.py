"""Tile configurations as data: the kernels' defaults, the alternatives, and a cost model. Without torch and triton."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from math import ceil
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearTile:
    """A tile of a product of tokens and a weight, of powers of two. The loop runs over `k` for y, `n` for dx.

    t: tokens.
    n: output features.
    k: input features.
    group: token tiles that share a column of weight tiles before the next group begins (persistent kernels only).
    num_warps, num_stages: as Triton's.
    """

    t: int = 64
    n: int = 64
    k: int = 64
    group: int = 8
    num_warps: int = 4
    num_stages: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class WgradTile:
    """A tile of a weight's gradient.

    n, k: rows and columns of dW.
    t: tokens per step of the loop.
    group: row tiles per column.
    num_warps, num_stages: as Triton's.
    """

    n: int = 128
    k: int = 128
    t: int = 64
    group: int = 8
    num_warps: int = 8
    num_stages: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingTile:
    """A program that copies rows.

    k: columns of one row.
    num_warps: as Triton's.
    """

    k: int = 1024
    num_warps: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingGradTile:
    """A program of the embedding's gradient.

    t: rows of dy per step of its loop.
    k: columns.
    segment: most rows that it sums.
    num_warps: as Triton's.
    """

    t: int = 4
    k: int = 512
    segment: int = 128
    num_warps: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftmaxTile:
    """A program of the softmax.

    t: tokens.
    v: columns of one step of its loop.
    num_warps: as Triton's.
    """

    t: int = 4
    v: int = 1024
    num_warps: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class QkvTile:
    """A tile of tokens and one head.

    t: tokens.
    k: input features a step.
    group: token tiles per head.
    num_warps, num_stages: as Triton's.
    """

    t: int
    k: int = 64
    group: int = 8
    num_warps: int = 4
    num_stages: int = 3


LINEAR = LinearTile()
STAGED_ODD = LinearTile(t=64, n=128, k=32, num_warps=8)  # for sizes that are not multiples of 16
STAGED_DX_ODD = LinearTile(t=64, n=32, k=128, num_warps=8)
WGRAD = WgradTile()
WGRAD_FP32 = WgradTile(n=64, k=64, t=32, num_stages=2)  # operands are twice as large: WGRAD does not fit sm_120
EMBEDDING = EmbeddingTile()  # a 16-byte load per thread in bf16
# Most runs of equal tokens are one to three rows long; 128 rows balance the two levels of the long ones.
EMBEDDING_GRAD = EmbeddingGradTile()
ONLINE_SOFTMAX = SoftmaxTile()
DIVERGENCE = SoftmaxTile(v=256)  # of two logits: longer rows spill on sm_80 and sm_120

ARCHITECTURES = (80, 90, 100, 120)
SHARED_LIMIT_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
# Chips without their own entries use those of another chip, with no more shared memory.
SAME_TILES_AS = {86: 120, 87: 80, 89: 120, 103: 100, 110: 100, 121: 120}

# Matrix operators: the dimensions of a program's output tile, and the one that its loop runs over.
DIMENSIONS = {"linear": ("t", "n", "k"), "linear_dx": ("t", "k", "n"), "linear_staged": ("t", "n", "k")}
DIMENSIONS |= {"linear_dx_staged": ("t", "k", "n"), "wgrad": ("n", "k", "t")}

# [Note: no autotuning] Tiles come from this table and never from `triton.autotune`: it finds the best tile by running
# a kernel many times on the given arguments. Kernels that add into gradient shards would add that many times, into
# memory that peers are adding to, and every rank would time the others' traffic and choose for itself.


@dataclass(frozen=True, slots=True, kw_only=True)
class TileEntry:
    """`tile` is for these operators, dtypes and architectures, and at most `tokens` tokens (None: any number)."""

    operators: tuple[str, ...]
    tile: Any
    element_bytes: tuple[int, ...] = (2, 4)
    archs: tuple[int, ...] = ARCHITECTURES
    tokens: int | None = None


# The first match counts. Not measured yet: these compile without a fault. `ranked` has others to try.
DEFAULTS: tuple[TileEntry, ...] = (
    # Longer steps spill on sm_80 with triton 3.9.
    TileEntry(operators=("linear",), element_bytes=(4,), tile=LinearTile(k=32)),
    TileEntry(operators=("linear",), tokens=64, tile=LINEAR),
    # Twice the tokens: half as many reads of the weight over the link.
    TileEntry(operators=("linear",), tile=LinearTile(t=128)),
    # Here too.
    TileEntry(operators=("linear_dx",), element_bytes=(4,), tile=LinearTile(n=32, num_warps=8, num_stages=2)),
    # A third stage spills on sm_120.
    TileEntry(operators=("linear_dx",), tokens=64, tile=LinearTile(num_stages=2)),
    TileEntry(operators=("linear_dx",), tile=LinearTile(t=128, num_stages=2)),
    TileEntry(
        operators=("linear_staged",), element_bytes=(4,), tile=LinearTile(t=64, n=64, k=32, num_warps=8, num_stages=2)
    ),
    # 213 KB of shared memory for 2-byte elements.
    TileEntry(operators=("linear_staged",), archs=(90, 100), tile=LinearTile(t=128, n=256, k=64, num_warps=8)),
    TileEntry(operators=("linear_staged",), archs=(80,), tile=LinearTile(t=128, n=128, k=64, num_warps=8)),
    TileEntry(operators=("linear_staged",), archs=(120,), tile=LinearTile(t=128, n=128, k=32, num_warps=8)),
    # 2 stages spill on sm_120 with triton 3.6.
    TileEntry(operators=("linear_dx_staged",), element_bytes=(4,), tile=LinearTile(t=64, n=32, k=64, num_warps=8)),
    TileEntry(operators=("linear_dx_staged",), archs=(90, 100), tile=LinearTile(t=128, n=64, k=256, num_warps=8)),
    TileEntry(operators=("linear_dx_staged",), archs=(80,), tile=LinearTile(t=128, n=64, k=128, num_warps=8)),
    TileEntry(operators=("linear_dx_staged",), archs=(120,), tile=LinearTile(t=128, n=32, k=128, num_warps=8)),
    TileEntry(operators=("qkv", "qkv_wide"), element_bytes=(4,), tile=QkvTile(t=64, k=32, num_warps=8, num_stages=2)),
    # Heads of 256.
    TileEntry(operators=("qkv_wide",), tile=QkvTile(t=64, num_warps=8, num_stages=2)),
    # Tall tiles re-read the weights less often, but leave few programs when there are few tokens.
    # Many loads in flight: the weights cross a link.
    TileEntry(operators=("qkv",), tokens=64, tile=QkvTile(t=64, num_warps=8, num_stages=4)),
    TileEntry(operators=("qkv",), tile=QkvTile(t=128, num_warps=8)),
    TileEntry(operators=("qkv_dx",), element_bytes=(4,), tile=LinearTile(n=32, num_stages=2)),
    TileEntry(operators=("qkv_dx",), tokens=64, tile=LinearTile(num_stages=2)),
    TileEntry(operators=("qkv_dx",), tile=LinearTile(t=128, n=64, k=128, num_warps=8)),
    # Both orientations of a weight, with or without a gate; `tokens` are an expert's on average.
    TileEntry(operators=("grouped_linear",), element_bytes=(4,), tile=LinearTile(n=32, k=32, num_warps=8)),
    TileEntry(operators=("grouped_linear",), tokens=64, tile=LINEAR),
    TileEntry(operators=("grouped_linear",), tile=LinearTile(t=128, n=128, num_warps=8)),
    TileEntry(operators=("wgrad",), element_bytes=(4,), tile=WGRAD_FP32),
    TileEntry(operators=("wgrad",), tile=WGRAD),
)


def tile_of(operator: str, *, element_bytes: int, arch: int, tokens: int) -> Any:
    """The default tile of `operator` for elements of that many bytes on sm_`arch` and that many tokens.

    Raises ValueError, with the known entries, if the table has none.
    """
    same = SAME_TILES_AS.get(arch, arch)
    for entry in DEFAULTS:
        wide = operator in entry.operators and element_bytes in entry.element_bytes and same in entry.archs
        if wide and (entry.tokens is None or tokens <= entry.tokens):
            return entry.tile
    known = sorted({name for entry in DEFAULTS for name in entry.operators})
    raise ValueError(
        f"no default tile of {operator} for {element_bytes}-byte elements on sm_{arch}; there are tiles of "
        f"{', '.join(known)}, of 2 and 4 bytes, on {', '.join(f'sm_{a}' for a in (*ARCHITECTURES, *SAME_TILES_AS))}"
    )


def of_integers(tile: WgradTile, *, arch: int, bulk: bool) -> WgradTile:
    """The tile of exact sums for `tile` on sm_`arch`: half the columns if its 8-byte integers would spill or
    not fit into shared memory. `bulk`: they are added by bulk reductions.
    """
    most_per_thread = 64 if arch == 90 and bulk else 32
    return tile if tile.n * tile.k <= most_per_thread * 32 * tile.num_warps else replace(tile, k=tile.k // 2)


def shared_bytes(operator: str, tile: Any, *, element_bytes: int, arch: int) -> int:
    """An upper estimate of a program's shared memory: the loop's buffers or the output tile, plus 8 KiB.

    sm_90 and sm_100 multiply 2-byte elements from shared memory, so a stage stays there while it is used; elsewhere it
    is copied to registers first, which takes one stage fewer.
    """
    rows, columns, step = (getattr(tile, name) for name in DIMENSIONS[operator])
    stages = tile.num_stages if arch in (90, 100) and element_bytes == 2 else max(tile.num_stages - 1, 1)
    loop = stages * (rows + columns) * step * element_bytes
    return max(loop, rows * columns * 4) + 8192


def fits(operator: str, tile: Any, *, element_bytes: int, arch: int) -> bool:
    """True if a tile should compile on sm_`arch` without a fault; `bench.kernels.aot` verifies it."""
    rows, columns, _ = (getattr(tile, name) for name in DIMENSIONS[operator])
    enough = shared_bytes(operator, tile, element_bytes=element_bytes, arch=arch) <= SHARED_LIMIT_BYTES[arch]
    # More sums per thread spill, sooner with fp32 operands; sm_100 keeps its matrix units' sums in another memory.
    per_thread = 32 if element_bytes == 4 else {90: 128, 100: 256}.get(arch, 64)
    registers = rows * columns <= per_thread * 32 * tile.num_warps
    # A warp group of sm_90 multiplies at least 64 rows.
    matrix = arch not in (90, 100) or element_bytes == 4 or rows >= 64
    return enough and registers and matrix


def candidates(operator: str, *, element_bytes: int, arch: int) -> list[Any]:
    """The tiles of `operator` to choose from on sm_`arch`: all that `fits`."""
    if operator not in DIMENSIONS:
        raise ValueError(f"no tiles are known for {operator}; known are {', '.join(DIMENSIONS)}")
    kind = WgradTile if operator == "wgrad" else LinearTile
    rows, columns, step = DIMENSIONS[operator]
    found = [
        kind(**{rows: r, columns: c, step: s}, num_warps=warps, num_stages=stages)
        for r, c, s in product((16, 32, 64, 128), (64, 128, 256), (32, 64, 128))
        for warps, stages in product((4, 8), (2, 3, 4))
    ]
    return [tile for tile in found if fits(operator, tile, element_bytes=element_bytes, arch=arch)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """Data-sheet figures of one kind of GPU: dense, per direction, per second. `arch`: 90 for sm_90.

    Compute and L2 rates are per multiprocessor (`sms` of them), so a chip with more is faster.
    """

    arch: int
    sms: int
    matrix_flops_per_sm: float  # bf16 and fp16
    fp32_flops_per_sm: float
    l2_bytes_s_per_sm: float  # reached in practice: about half of 64 bytes a clock
    hbm_bytes_s: float
    link_bytes_s: float
    l2_bytes: int
    launch_s: float = 4e-6  # of a kernel or a copy


_H100 = Chip(
    arch=90,
    sms=132,
    matrix_flops_per_sm=989e12 / 132,
    fp32_flops_per_sm=67e12 / 132,
    l2_bytes_s_per_sm=56e9,
    hbm_bytes_s=3.35e12,
    link_bytes_s=450e9,
    l2_bytes=50_000_000,
)
CHIPS = {
    "A100 SXM": Chip(
        arch=80,
        sms=108,
        matrix_flops_per_sm=312e12 / 108,
        fp32_flops_per_sm=19.5e12 / 108,
        l2_bytes_s_per_sm=45e9,
        hbm_bytes_s=2.0e12,
        link_bytes_s=300e9,
        l2_bytes=40_000_000,
    ),
    "H200 SXM": replace(_H100, hbm_bytes_s=4.8e12, l2_bytes=60_000_000),
    "H100 SXM": _H100,
    "B200": Chip(
        arch=100,
        sms=148,
        matrix_flops_per_sm=2250e12 / 148,
        fp32_flops_per_sm=75e12 / 148,
        l2_bytes_s_per_sm=59e9,
        hbm_bytes_s=7.7e12,
        link_bytes_s=900e9,
        l2_bytes=126_000_000,
    ),
    # Its link is PCIe 5.0 x16.
    "RTX PRO 6000": Chip(
        arch=120,
        sms=188,
        matrix_flops_per_sm=503e12 / 188,
        fp32_flops_per_sm=125e12 / 188,
        l2_bytes_s_per_sm=40e9,
        hbm_bytes_s=1.79e12,
        link_bytes_s=64e9,
        l2_bytes=128_000_000,
    ),
}


def chip_of(name: str, arch: int) -> Chip | None:
    """The chip of a device named `name`, such as "NVIDIA H100 80GB HBM3"; else one of its `arch`, if any."""
    same = [(model, chip) for model, chip in CHIPS.items() if chip.arch == arch]
    named = (chip for model, chip in same if model.removesuffix(" SXM") in name)
    return next(named, same[0][1] if same else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductShape:
    """T tokens, a weight [N, K] of `rows` N and `columns` K sharded over `world` owners."""

    tokens: int
    rows: int
    columns: int
    world: int
    element_bytes: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The predicted work of a kernel. `flops` includes the tiles' empty parts. `waves`: rounds of programs."""

    flops: float
    hbm_bytes: float
    link_bytes: float
    waves: int
    seconds: float


def predict(operator: str, tile: Any, problem: ProductShape, chip: Chip) -> Cost:
    """The cost of one call of a matrix operator, to rank tiles and ways to run it without a measurement.

    Compute, memory and link overlap, so the slowest counts. It assumes one program per multiprocessor at a time and
    one compute rate for every tile; a tile's size shows in waves and in bytes read from the L2. Copies of
    `linear_staged` overlap with all but the work on the shard that arrives last.
    """
    t, n, k = problem.tokens, problem.rows, problem.columns
    size, staged = problem.element_bytes, operator.endswith("_staged")
    own = -(-n // problem.world)  # rank 0's rows; the last owners may have fewer
    row_tiles = sum(ceil(min(own, n - first) / tile.n) for first in range(0, n, own))
    blocks = {"t": ceil(t / tile.t), "n": row_tiles, "k": ceil(k / tile.k)}
    out_rows, out_columns, step = DIMENSIONS[operator]
    programs, steps = blocks[out_rows] * blocks[out_columns], blocks[step]
    waves = ceil(programs / chip.sms)
    tile_flops = 2 * steps * tile.t * tile.n * tile.k
    tile_l2_bytes = steps * (getattr(tile, out_rows) + getattr(tile, out_columns)) * getattr(tile, step) * size
    flops_per_sm = chip.matrix_flops_per_sm if size == 2 else chip.fp32_flops_per_sm
    compute_s = waves * max(tile_flops / flops_per_sm, tile_l2_bytes / chip.l2_bytes_s_per_sm)

    def read(elements: int, times: int) -> int:
        """Bytes from HBM: data that does not stay in the L2 is read again in every wave that needs it."""
        return elements * size * (1 if elements * size <= chip.l2_bytes else max(1, min(times, waves)))

    remote = (n - own) * k
    if operator == "wgrad":
        link_bytes = remote * 4
        hbm_bytes = read(t * n, blocks["k"]) + read(t * k, blocks["n"]) + own * k * 8
    else:
        link_bytes = remote * size * (1 if staged else blocks["t"])
        here = n * k if staged else own * k
        x, y = (t * k, t * n) if out_columns == "n" else (t * n, t * k)
        hbm_bytes = read(x, blocks[out_columns]) + read(here, blocks["t"]) + y * size + staged * remote * size
    link_s, hbm_s = link_bytes / chip.link_bytes_s, hbm_bytes / chip.hbm_bytes_s
    if staged and link_bytes:
        link_s += chip.launch_s * (problem.world - 1) + compute_s / problem.world
    return Cost(
        flops=float(programs * tile_flops),
        hbm_bytes=float(hbm_bytes),
        link_bytes=float(link_bytes),
        waves=waves,
        seconds=chip.launch_s + max(compute_s, hbm_s, link_s),
    )


def ranked(operator: str, problem: ProductShape, chip: Chip) -> list[tuple[float, Any]]:
    """(predicted seconds, tile) of every candidate, the fastest first."""
    tiles = candidates(operator, element_bytes=problem.element_bytes, arch=chip.arch)
    return sorted(((predict(operator, tile, problem, chip).seconds, tile) for tile in tiles), key=lambda pair: pair[0])
