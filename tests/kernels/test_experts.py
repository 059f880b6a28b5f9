"""The grouped products of experts against plain torch over all owners' shards; gates against transformers."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

import pytest
import torch

from tests.support import place, slow  # isort: skip

import triton
import triton.language as tl

from odc_kernels.experts import (
    Gate,
    block_of_rows,
    gate_ref,
    grouped_linear,
    grouped_linear_dx,
    grouped_linear_dx_ref,
    grouped_linear_ref,
    grouped_wgrad,
    grouped_wgrad_ref,
)
from odc_kernels.peers import ALL, PeerShards, join
from odc_kernels.tiles import LinearTile, WgradTile
from tests.kernels.test_matrix import TOLERANCE
from tests.support.place import split

pytestmark = place.MARKS

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
TILE, WGRAD_TILE = LinearTile(t=16, n=16, k=16, group=2), WgradTile(n=16, k=16, t=16, group=2)
# Rows before the first expert, of each expert, after the last; N, K; world. A world of E is a table of addresses.
MIXED = (3, [5, 0, 37, 1, 0], 2, 20, 18, 3)  # 2, 2 and 1 experts; several blocks; more than a tile
SIZES = [
    (0, [0, 0, 50, 0], 0, 34, 16, 8),  # all on one, owners without experts
    (0, [1, 1, 2, 1, 16, 1, 3], 0, 2, 1, 7),
    (4, [0, 0], 1, 4, 3, 2),  # none is of these experts
    (0, [0, 0, 0], 0, 4, 3, 2),
    (1, [33], 0, 6, 40, 1),
]
GPT_OSS = Gate(limit=1.5, alpha=1.702, interleaved=True)
# transposed, whether there is a bias, the gate: as Qwen's and gpt-oss's experts have them, and the others.
KINDS: list[tuple[bool, bool, Gate | None]] = [
    (False, False, Gate()),
    (True, True, GPT_OSS),
    (True, False, None),
    (False, True, None),
]
REST = [
    (False, True, GPT_OSS),
    (True, False, Gate()),
    (False, False, Gate(interleaved=True)),
    (True, True, Gate(limit=1)),
]
CASES: list[Any] = [
    *((MIXED, FP32, kind) for kind in KINDS),
    *((sizes, FP32, KINDS[place % 2]) for place, sizes in enumerate(SIZES)),
    (MIXED, BF16, KINDS[1]),
    *(slow(sizes, dtype, kind) for sizes, dtype, kind in product(SIZES, (FP32, FP16, BF16), KINDS)),
    *(slow(MIXED, dtype, kind) for dtype, kind in product((FP32, FP16, BF16), REST)),
]


class Experts:
    """Random weights and offsets of these sizes. `peers` are their shards, seen from a rank."""

    def __init__(self, sizes: tuple, dtype: torch.dtype, transposed: bool, world: int | None = None) -> None:
        before, counts, after, self.outputs, self.inputs, self.world = sizes
        self.dtype, self.transposed, self.rows = dtype, transposed, before + sum(counts) + after
        self.offsets = (before + torch.tensor([0, *counts]).cumsum(0)).int()
        shape = (self.inputs, self.outputs) if transposed else (self.outputs, self.inputs)
        self.weight = split(torch.randn(len(counts), *shape).to(dtype), self.world)
        self.bias = split(torch.randn(len(counts), self.outputs).to(dtype), self.world)

    def peers(self, shards: list[torch.Tensor], rank: int) -> PeerShards:
        return PeerShards.of(shards, shape=join(shards).shape, rank=rank, near=ALL)

    def tensor(self, columns: int) -> torch.Tensor:
        return torch.randn(self.rows, columns).to(self.dtype)

    def poisoned(self, columns: int) -> torch.Tensor:
        return torch.full((self.rows, columns), torch.nan, dtype=self.dtype)


def close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    """Rows of no expert are NaN in both: they are not written."""
    known = want[~want.isnan()]
    scale = max(known.abs().max().item(), 1.0) if known.numel() else 1.0  # terms of about 1 may cancel
    tolerance = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype] * scale}
    torch.testing.assert_close(got.double(), want, equal_nan=True, **tolerance)


@pytest.mark.parametrize(("sizes", "dtype", "kind"), CASES, ids=str)
def test_linear(sizes: tuple, dtype: torch.dtype, kind: tuple[bool, bool, Gate | None]) -> None:
    transposed, has_bias, gate = kind
    of = Experts(sizes, dtype, transposed)
    x, bias, rank = of.tensor(of.inputs), of.bias if has_bias else None, of.world // 2
    out, pre = of.poisoned(of.outputs // (1 if gate is None else 2)), None if gate is None else of.poisoned(of.outputs)
    given = {"x": x, "offsets": of.offsets, "weight": of.peers(of.weight, rank), "transposed": transposed, "tile": TILE}
    given |= {"gate": gate, "bias": of.peers(bias, rank) if bias else None}
    grouped_linear(**given, out=out, pre=pre)
    want = grouped_linear_ref(x, of.offsets, of.weight, bias, transposed=transposed)
    close(out, want if gate is None else gate_ref(want, gate), dtype)
    if pre is not None:
        close(pre, want, dtype)
        grouped_linear(**given, out=(alone := torch.full_like(out, torch.nan)))
        assert torch.equal(alone.nan_to_num(7), out.nan_to_num(7))


@pytest.mark.parametrize(("sizes", "dtype", "kind"), CASES, ids=str)
def test_linear_dx(sizes: tuple, dtype: torch.dtype, kind: tuple[bool, bool, Gate | None]) -> None:
    of = Experts(sizes, dtype, transposed=kind[0])
    dy, out, given = of.tensor(of.outputs), of.poisoned(of.inputs), {"transposed": of.transposed}
    grouped_linear_dx(dy=dy, offsets=of.offsets, weight=of.peers(of.weight, of.world - 1), out=out, tile=TILE, **given)
    close(out, grouped_linear_dx_ref(dy, of.offsets, of.weight, **given), dtype)


@pytest.mark.parametrize(("sizes", "dtype", "kind"), CASES, ids=str)
def test_wgrad(sizes: tuple, dtype: torch.dtype, kind: tuple[bool, bool, Gate | None]) -> None:
    transposed, has_bias, _ = kind
    of = Experts(sizes, dtype, transposed)
    dy, x, rank = of.tensor(of.outputs), of.tensor(of.inputs), of.world // 2
    weight, bias = (split(torch.randn(join(each).shape), of.world) for each in (of.weight, of.bias))
    before = join(weight).clone(), join(bias).clone()
    grouped_wgrad(
        dy=dy,
        x=x,
        offsets=of.offsets,
        weight=of.peers(weight, rank),
        bias=of.peers(bias, rank) if has_bias else None,
        transposed=transposed,
        scale=0.5,
        tile=WGRAD_TILE,
    )
    added = grouped_wgrad_ref(dy, x, of.offsets, transposed=transposed)
    for now, held, more in zip((weight, bias), before, (added[0], added[1] * has_bias), strict=True):
        close(join(now), held.double() + 0.5 * more, FP32)  # accumulated in fp32 whatever the inputs are
        untouched = (more == 0).flatten(1).all(1)
        assert torch.equal(join(now)[untouched], held[untouched])


def test_the_equations() -> None:
    """The references against transformers' way: a product per expert, by autograd."""
    of = Experts(MIXED, torch.float64, transposed=True)
    x = of.tensor(of.inputs).requires_grad_()
    weight, bias = join(of.weight).requires_grad_(), join(of.bias).requires_grad_()
    bounds = of.offsets.tolist()
    y = torch.cat([x[a:b] @ weight[e] + bias[e] for e, (a, b) in enumerate(pairwise(bounds))])
    dy = of.tensor(of.outputs)
    inside = slice(bounds[0], bounds[-1])
    dx, *sums = torch.autograd.grad(y, (x, weight, bias), dy[inside])
    given = {"transposed": True}
    torch.testing.assert_close(grouped_linear_ref(x, of.offsets, [weight], [bias], **given)[inside], y)
    torch.testing.assert_close(grouped_linear_dx_ref(dy, of.offsets, [weight], **given)[inside], dx[inside])
    for got, want in zip(grouped_wgrad_ref(dy, x, of.offsets, **given), sums, strict=True):
        torch.testing.assert_close(got, want)


def test_gates_as_transformers_and_of_nan() -> None:
    from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    config = GptOssConfig(hidden_size=8, intermediate_size=8, num_local_experts=1)
    experts, x = GptOssExperts(config), torch.linspace(-12, 12, 64).view(4, 16)
    x[0, 0] = x[1, 1] = x[2, 2] = torch.nan
    gate = Gate(limit=experts.limit, alpha=experts.alpha, interleaved=True)
    eye = PeerShards.local(torch.eye(16)[None])
    out = torch.zeros(4, 8)
    grouped_linear(x=x.nan_to_num(), offsets=torch.tensor([0, 4]).int(), weight=eye, out=out, gate=gate, tile=TILE)
    torch.testing.assert_close(out, experts._apply_gate(x.nan_to_num()))
    torch.testing.assert_close(gate_ref(x, gate), experts._apply_gate(x).double(), equal_nan=True, rtol=1e-5, atol=1e-6)
    grouped_linear(x=x[:3], offsets=torch.tensor([0, 3]).int(), weight=eye, out=out[:3], gate=gate, tile=TILE)
    assert out[:3].isnan().any(1).all()


@triton.jit
def _blocks(offsets, out, experts, first, BLOCK_S: tl.constexpr, BLOCK_E: tl.constexpr):
    expert, block = block_of_rows(offsets, experts, first, tl.program_id(0), BLOCK_S, BLOCK_E)
    tl.store(out + 2 * tl.program_id(0), expert)
    tl.store(out + 2 * tl.program_id(0) + 1, block)


@pytest.mark.parametrize("first", [0, 2, 4])
@pytest.mark.parametrize("counts", [[4, 0, 5, 1, 8], [0, 0, 13, 0, 0], [0, 0, 0, 0, 1], [1, 2, 3, 4, 5], [4] * 5])
def test_each_block_is_found_once_the_first_experts_before(counts: list[int], first: int) -> None:
    size, rows, experts = 4, sum(counts), len(counts)
    offsets = (7 + torch.tensor([0, *counts]).cumsum(0)).int()
    out = torch.zeros(rows // size + min(experts, rows), 2, dtype=torch.int32)
    _blocks[(len(out),)](offsets, out, experts, first, BLOCK_S=size, BLOCK_E=8)
    found = [(e, block) for e, block in out.tolist() if block < -(-counts[e] // size)]
    order = [(first + place) % experts for place in range(experts)]
    assert found == [(e, block) for e in order for block in range(-(-counts[e] // size))]


def test_a_part_of_the_experts() -> None:
    """As with groups in a slot: parts of offsets and of the weight make all rows of the whole."""
    of = Experts(MIXED, FP32, transposed=False)
    x, out = of.tensor(of.inputs), of.poisoned(of.outputs)
    for part in (slice(0, 2), slice(2, 5)):
        weight = PeerShards.local(join(of.weight)[part].clone())
        grouped_linear(x=x, offsets=of.offsets[part.start : part.stop + 1], weight=weight, out=out, tile=TILE)
    close(out, grouped_linear_ref(x, of.offsets, of.weight), FP32)


def test_default_tiles() -> None:
    for dtype, rows in ((FP32, 9), (BF16, 9), (BF16, 70)):
        of = Experts((0, [rows], 0, 136, 72, 1), dtype, transposed=False)
        x, out, weight = of.tensor(of.inputs), of.poisoned(of.outputs // 2), of.peers(of.weight, 0)
        grouped_linear(x=x, offsets=of.offsets, weight=weight, out=out, gate=Gate())
        close(out, gate_ref(grouped_linear_ref(x, of.offsets, of.weight), Gate()), dtype)


def test_addresses_past_two_to_the_31() -> None:
    # A table says that a shard begins 2^31 elements before the one expert that there is.
    experts, inputs = 2**9 + 1, 2**18
    one = torch.randn(1, 16, inputs)
    table = torch.tensor([one.data_ptr() - 2**31 * one.element_size()], dtype=torch.int64)
    weight = PeerShards(table=table, shape=(experts, 16, inputs), rank=0, dtype=FP32, near=frozenset({0}))
    offsets = torch.zeros(experts + 1, dtype=torch.int32)
    offsets[-1] = 1
    x, out = torch.zeros(1, inputs), torch.zeros(1, 16)
    x[0, -1] = 2.0
    given = {"x": x, "offsets": offsets, "weight": weight}
    grouped_linear(**given, out=out, tile=LinearTile(t=16, n=16, k=2**14))
    assert torch.equal(out[0], 2 * one[0, :, -1])
    want = out[0] / 2 + 2
    grouped_wgrad(**given, dy=torch.ones(1, 16), tile=WgradTile(n=16, k=2**16, t=16))
    assert torch.equal(one[0, :, -1], want)
