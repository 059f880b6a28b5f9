"""The grouped products of experts against plain torch over all owners' shards, and that against transformers."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch

from tests.support import place, slow  # isort: skip

import triton
import triton.language as tl

from odc_kernels import experts
from odc_kernels.experts import Gate, block_of_rows, gate_ref, grouped_linear, grouped_linear_dx
from odc_kernels.experts_wgrad import grouped_wgrad, grouped_wgrad_ref
from odc_kernels.peers import ALL, PeerShards, join
from odc_kernels.tiles import LinearTile, WgradTile
from tests.kernels.test_matrix import close
from tests.support.place import split

pytestmark = place.MARKS

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
TILE, WGRAD_TILE = LinearTile(t=16, n=16, k=16, group=2), WgradTile(n=16, k=16, t=16, group=2)
# Rows before the first expert, of each expert, after the last; N, K; world. A world of E is a table of addresses.
MIXED = (3, [5, 0, 37, 1, 0], 2, 20, 18, 3)  # 2, 2 and 1 experts; several blocks; more than a tile
SIZES = [
    (0, [0, 0, 50, 0], 0, 6, 16, 8),  # all on one, owners without experts
    (0, [1, 1, 2, 1, 16, 1, 3], 0, 2, 1, 7),
    (4, [0, 0], 1, 4, 3, 2),  # none is of these experts
    (0, [0, 0, 0], 0, 4, 3, 2),
    (1, [33], 0, 34, 40, 1),
]
GPT_OSS = Gate(limit=1.5, alpha=1.702, interleaved=True)
# Whether it is transposed and has a bias, and the gate: as Qwen's and gpt-oss's experts have them, then the others.
QWEN, OSS, DOWN, OSS_DOWN = (False, False, Gate()), (True, True, GPT_OSS), (False, False, None), (True, True, None)
REST = [
    (False, True, GPT_OSS),
    (True, False, Gate()),
    (False, False, Gate(interleaved=True)),
    (True, True, Gate(limit=1)),
]
CASES: list[Any] = [
    *((MIXED, FP32, kind) for kind in (QWEN, OSS)),
    *(slow(MIXED, FP32, kind) for kind in (DOWN, OSS_DOWN)),
    *((sizes, FP32, QWEN) for sizes in SIZES),
    (MIXED, BF16, OSS),
    *(slow(sizes, dtype, kind) for sizes, dtype, kind in product(SIZES, (FP32, FP16, BF16), (OSS, OSS_DOWN))),
    *(slow(MIXED, dtype, kind) for dtype, kind in product((FP32, FP16, BF16), REST)),
]


def offsets_of(counts: list[int], before: int = 0) -> torch.Tensor:
    return (before + torch.tensor([0, *counts]).cumsum(0)).int()


@pytest.mark.parametrize(("sizes", "dtype", "kind"), CASES, ids=str)
def test_products(sizes: tuple, dtype: torch.dtype, kind: tuple[bool, bool, Gate | None]) -> None:
    (before, counts, after, outputs, inputs, world), (transposed, has_bias, gate) = sizes, kind
    offsets, rows, size = offsets_of(counts, before), before + sum(counts) + after, len(counts)
    shape = (inputs, outputs) if transposed else (outputs, inputs)
    weight, bias = (split(torch.randn(size, *each).to(dtype), world) for each in (shape, (outputs,)))
    x, dy = torch.randn(rows, inputs).to(dtype), torch.randn(rows, outputs).to(dtype)

    def peers(shards: list[torch.Tensor]) -> PeerShards:
        return PeerShards.of(shards, shape=join(shards).shape, rank=world // 2, near=ALL)

    both, poisoned = {"offsets": offsets, "transposed": transposed}, partial(x.new_full, fill_value=torch.nan)
    given = {"x": x, "weight": peers(weight), "bias": peers(bias) if has_bias else None, **both, "tile": TILE}
    out, pre = poisoned((rows, outputs // 2 if gate else outputs)), poisoned((rows, outputs)) if gate else None
    grouped_linear(**given, out=out, gate=gate, pre=pre)
    leaves = [each.double().requires_grad_() for each in (x, join(weight), join(bias))]
    y = experts.grouped_linear_ref(leaves[0], weight=leaves[1:2], bias=leaves[2:] if has_bias else None, **both)
    want, inside = y.detach(), slice(*offsets[[0, -1]].tolist())
    close(out, gate_ref(want, gate) if gate else want, dtype)
    if pre is not None:
        close(pre, want, dtype)

    # The references of gradients against autograd's.
    of_y = torch.autograd.grad(y[inside], leaves[: 2 + has_bias], dy[inside].double())
    want = experts.grouped_linear_ref(dy, offsets, weight, transposed=not transposed)
    sums = grouped_wgrad_ref(dy, x, **both)
    torch.testing.assert_close((want[inside], *sums)[: 2 + has_bias], (of_y[0][inside], *of_y[1:]))
    grouped_linear_dx(dy=dy, weight=peers(weight), out=(dx := poisoned((rows, inputs))), **both, tile=TILE)
    close(dx, want, dtype)

    held, without = [torch.randn(join(each).shape) for each in (weight, bias)], torch.tensor(counts) == 0
    for each in held:
        each[without] = -0.0  # any addition changes it, of a zero too
    shards = [split(each, world) for each in held]
    given = {"weight": peers(shards[0]), "bias": peers(shards[1]) if has_bias else None, **both, "tile": WGRAD_TILE}
    grouped_wgrad(dy=dy, x=x, **given, scale=0.5)
    for now, then, more in zip(map(join, shards), held, (sums[0], sums[1] * has_bias), strict=True):
        close(now, then.double() + 0.5 * more, FP32)  # accumulated in fp32 whatever the inputs are
        assert now[without].signbit().all()


@pytest.mark.slow
def test_the_gate_of_transformers_keeps_nan() -> None:
    from transformers.models.gpt_oss import configuration_gpt_oss, modeling_gpt_oss

    config = configuration_gpt_oss.GptOssConfig(hidden_size=8, intermediate_size=8, num_local_experts=1)
    module, x, out = modeling_gpt_oss.GptOssExperts(config), torch.linspace(-12, 12, 64).view(4, 16), torch.zeros(4, 8)
    gate = Gate(limit=module.limit, alpha=module.alpha, interleaved=True)
    given = {"offsets": offsets_of([4]), "weight": PeerShards.local(torch.eye(16)[None]), "gate": gate, "tile": TILE}
    grouped_linear(x=x, out=out, **given)
    torch.testing.assert_close(out, module._apply_gate(x))
    x[0, 0] = x[1, 1] = torch.nan
    grouped_linear(x=x, out=out, **given)
    assert out.isnan().any(1).tolist() == [True, True, False, False]


@triton.jit
def _blocks(offsets, out, experts, first, BLOCK_S: tl.constexpr, BLOCK_E: tl.constexpr):
    expert, block = block_of_rows(offsets, experts, first, tl.program_id(0), BLOCK_S, BLOCK_E)
    tl.store(out + 2 * tl.program_id(0), expert)
    tl.store(out + 2 * tl.program_id(0) + 1, block)


@pytest.mark.parametrize("first", [0, 2, 4])
@pytest.mark.parametrize("counts", [[4, 0, 5, 1, 8], [0, 0, 13, 0, 0], [0, 0, 0, 0, 1], [1, 2, 3, 4, 5], [4] * 5])
def test_each_block_is_found_once_the_first_experts_before(counts: list[int], first: int) -> None:
    size, experts = 4, len(counts)
    out = torch.zeros(sum(counts) // size + min(experts, sum(counts)), 2, dtype=torch.int32)
    _blocks[(len(out),)](offsets_of(counts, 7), out, experts, first, BLOCK_S=size, BLOCK_E=8)
    found = [(e, block) for e, block in out.tolist() if block < -(-counts[e] // size)]
    order = [(first + place) % experts for place in range(experts)]
    assert found == [(e, block) for e in order for block in range(-(-counts[e] // size))]


def test_a_part_of_the_experts_by_default_tiles() -> None:
    """As with groups in a slot: parts of offsets and of the weight make all rows of the whole."""
    x, weight, offsets = torch.randn(75, 72), torch.randn(5, 40, 72), offsets_of([3, 0, 66, 4, 1], 1)
    out = torch.full((75, 20), torch.nan)
    for part in (slice(0, 2), slice(2, 5)):
        peers = PeerShards.local(weight[part].clone())
        grouped_linear(x=x, offsets=offsets[part.start : part.stop + 1], weight=peers, out=out, gate=Gate())
    close(out, gate_ref(experts.grouped_linear_ref(x, offsets, [weight]), Gate()), FP32)
