"""What kernels add to exact sums: integers, bitwise those of the fp32 values that they add without them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.support import place, slow  # isort: skip

from odc_kernels.embedding import EmbeddingGradTile, embedding_grad
from odc_kernels.experts_wgrad import grouped_wgrad
from odc_kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_grad
from odc_kernels.peers import ALL, ExactAdds, PeerShards, join
from odc_kernels.qkv_grad import QkvGradients, qkv_grad
from odc_kernels.qkv_inputs import QkvWeights, Rope
from odc_kernels.scatter import scatter
from odc_kernels.tiles import LinearTile, WgradTile
from odc_kernels.wgrad import wgrad
from tests.support.place import split

pytestmark = place.MARKS

EXPONENT = 20  # of numbers near 1 some bits are cut off
GRAD_TILE, TILE = EmbeddingGradTile(t=2, k=16, segment=4), WgradTile(n=16, k=32, t=16, group=2)
FP32, BF16 = torch.float32, torch.bfloat16

Run = Callable[..., None]  # adds to the shards that it gets
Draw = Callable[..., torch.Tensor]  # the inputs: `torch.randn`, or other numbers


def _scatter(draw: Draw, *shape: int) -> tuple[list[tuple], Run]:
    gradient = draw(*shape)
    return [shape], lambda peers: scatter(gradient=gradient, peers=peers, scale=0.5, block=64)


def _wgrad(draw: Draw, tokens: int, rows: int, columns: int) -> tuple[list[tuple], Run]:
    dy, x = draw(tokens, rows), draw(tokens, columns)

    def run(weight: PeerShards, bias: PeerShards) -> None:
        wgrad(dy=dy, x=x, weight=weight, bias=bias, scale=0.5, tile=TILE)

    return [(rows, columns), (rows,)], run


def _experts(draw: Draw, rows: int, counts: list[int], outputs: int, inputs: int) -> tuple[list[tuple], Run]:
    dy, x = draw(rows, outputs), draw(rows, inputs)
    offsets = torch.tensor([0, *counts]).cumsum(0).int()

    def run(weight: PeerShards, bias: PeerShards) -> None:
        grouped_wgrad(dy=dy, x=x, offsets=offsets, weight=weight, bias=bias, scale=0.5, tile=TILE)

    return [(len(counts), outputs, inputs), (len(counts), outputs)], run


def _ids(tokens: int, rows: int) -> torch.Tensor:
    """Half of them are one id: its run is several segments long."""
    ids = torch.arange(tokens) * 7 % rows
    ids[::2] = rows // 2
    return ids


def _embedding(draw: Draw, tokens: int, rows: int, columns: int) -> tuple[list[tuple], Run]:
    dy, ids = draw(tokens, columns), _ids(tokens, rows)
    return [(rows, columns)], lambda peers: embedding_grad(dy=dy, ids=ids, weight=peers, scale=0.5, tile=GRAD_TILE)


def _head(draw: Draw, tokens: int, rows: int, columns: int) -> tuple[list[tuple], Run]:
    h, whole, targets = draw(tokens, columns), torch.randn(rows, columns), torch.arange(tokens) % rows

    def run(gradient: PeerShards) -> None:
        weight = PeerShards.of(split(whole.to(h.dtype), gradient.world), shape=(rows, columns), rank=gradient.rank)
        given = {"h": h, "weight": weight, "targets": targets, "chunk": 16, "eager": False}
        output = linear_cross_entropy(**given)
        linear_cross_entropy_grad(**given, output=output, g_logp=torch.ones(tokens), gradient=gradient, dh=None)

    return [(rows, columns)], run


def _qkv(draw: Draw, tokens: int, columns: int) -> tuple[list[tuple], Run]:
    x, dq, dk, dv = draw(tokens, columns), draw(tokens, 2, 16), draw(tokens, 1, 16), draw(tokens, 1, 16)
    rope = Rope(cos=torch.rand(tokens, 16), sin=torch.rand(tokens, 16), positions=torch.arange(tokens))
    whole = {"wq": torch.randn(32, columns), "wk": torch.randn(16, columns), "wv": torch.randn(16, columns)}

    def run(*peers: PeerShards) -> None:
        world = peers[0].world
        weights = {name: PeerShards.of(split(w.to(x.dtype), world), shape=w.shape) for name, w in whole.items()}
        given = {"dq": dq, "dk": dk, "dv": dv, "x": x, "rope": rope, "scale": 0.5}
        out = QkvGradients(**dict(zip(("wq", "wk", "wv", "bq", "bk"), peers, strict=True)))
        tiles = {"block": 16, "dx_tile": LinearTile(t=16, n=16, k=16), "wgrad_tile": TILE}
        qkv_grad(**given, weights=QkvWeights(**weights), out=out, **tiles)

    return [*(tuple(w.shape) for w in whole.values()), (32,), (16,)], run


MAKE = {"scatter": _scatter, "wgrad": _wgrad, "embedding": _embedding, "head": _head, "qkv": _qkv, "experts": _experts}
# Odd sizes, one row, owners without rows, nothing to add, more than a block or a tile.
CASES = [
    *(("scatter", shape) for shape in [(7, 5), (1, 3), (3,), (0, 4), (9, 16)]),
    *(("wgrad", sizes) for sizes in [(5, 7, 3), (4, 1, 5), (33, 20, 18), (0, 4, 4)]),
    *(("embedding", sizes) for sizes in [(13, 7, 20), (5, 1, 3), (18, 4, 5), (0, 4, 4)]),
    *(("head", sizes) for sizes in [(5, 37, 8), (3, 1, 4)]),
    ("qkv", (17, 9)),
    *(("experts", sizes) for sizes in [(19, [0, 1, 18, 0], 20, 33), (0, [0, 0], 4, 4)]),
]
EACH = [("scatter", (7, 5)), ("wgrad", (5, 7, 3)), ("embedding", (18, 4, 5)), ("head", (5, 37, 8)), ("qkv", (5, 3))]
EACH += [("experts", (5, [2, 0, 3], 7, 3))]
MATRIX = [*((*each, 3, FP32) for each in CASES), *(slow(*each, 1, BF16) for each in CASES)]


def _exact() -> ExactAdds:
    return ExactAdds(factor=2.0**EXPONENT, largest=torch.zeros(1, dtype=torch.int32))


def _added(
    run: Run, before: list[torch.Tensor], world: int, *, rank: int = 0, exact: ExactAdds | None = None
) -> torch.Tensor:
    """All sums in a row, after `run` has added to shards that hold `before`."""
    shards = [split(each, world) for each in before]
    peers = [PeerShards.of(s, shape=each.shape, rank=rank, near=ALL) for s, each in zip(shards, before, strict=True)]
    run(*(replace(each, exact=exact) for each in peers))
    return torch.cat([join(each).flatten() for each in shards])


def _integers(g: torch.Tensor) -> torch.Tensor:
    """What is added for g: 0 for what is not finite or does not fit."""
    scaled = g.double() * 2.0**EXPONENT
    return torch.where(scaled.abs() < 2.0**62, scaled, 0.0).trunc().long()


def _check(kernel: str, sizes: tuple, world: int, draw: Draw) -> ExactAdds:
    shapes, run = MAKE[kernel](draw, *sizes)
    g = _added(run, [torch.zeros(shape) for shape in shapes], world, rank=world // 2)
    before = [torch.randint(-(2**60), 2**60, shape) for shape in shapes]
    got = _added(run, before, world, rank=world // 2, exact=(exact := _exact()))
    assert torch.equal(got, torch.cat([each.flatten() for each in before]) + _integers(g))
    largest, seen = g.abs().max() if g.numel() else torch.zeros(()), exact.largest.view(FP32)[0]
    assert seen == largest or not (seen.isfinite() or largest.isfinite())  # a tile ends in inf times 0
    return exact


@pytest.mark.parametrize(("kernel", "sizes", "world", "dtype"), MATRIX, ids=str)
def test_integers_of_the_same_fp32_values(kernel: str, sizes: tuple, world: int, dtype: torch.dtype) -> None:
    """So a value is added once, whole, and the largest is that of the values."""
    _check(kernel, sizes, world, lambda *shape: torch.randn(shape).to(dtype))


@pytest.mark.parametrize(
    ("kernel", "sizes", "bad"),
    [*((*each, bad) for each in EACH for bad in (torch.nan, -1e30)), (*EACH[0], torch.inf), (*EACH[1], -torch.inf)],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # by the interpreter
def test_what_does_not_fit_is_not_added_and_seen(kernel: str, sizes: tuple, bad: float) -> None:
    def spoilt(*shape: int) -> torch.Tensor:
        values = torch.randn(shape)
        values.view(-1)[len(values) // 2] = bad
        return values

    seen = _check(kernel, sizes, 2, spoilt).largest.view(FP32)
    assert not seen.abs() * 2.0**EXPONENT < 2.0**62


@pytest.mark.parametrize("dtype", [torch.int64, FP32], ids=str)
@pytest.mark.parametrize(("kernel", "sizes"), EACH, ids=str)
def test_sums_of_the_wrong_kind_are_refused(kernel: str, sizes: tuple, dtype: torch.dtype) -> None:
    """Integers without a factor, and a factor for fp32."""
    shapes, run = MAKE[kernel](torch.randn, *sizes)
    exact = _exact() if dtype == FP32 else None
    with pytest.raises(ValueError, match=r"out.wq has|summed in float32 .* or in int64|needs dtype"):
        _added(run, [torch.zeros(shape, dtype=dtype) for shape in shapes], 2, exact=exact)
