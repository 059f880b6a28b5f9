"""gather and scatter under Triton's interpreter, against plain torch over all owners' shards."""

from __future__ import annotations

import pytest
import torch

from tests.support import place  # isort: skip

from odc_kernels.gather import ShardList, gather, gather_many, gather_ref
from odc_kernels.peers import PeerShards, join
from odc_kernels.scatter import scatter, scatter_ref
from tests.support.place import split

pytestmark = place.MARKS
SHAPES = [(16, 8), (7, 5), (1, 3), (3,), (9, 2, 3), (5, 0), (0, 4), (64, 33), (9, 7)]  # the last: one less than a block
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CASES = place.matrix(SHAPES, DTYPES, mixed=[(7, 5), (64, 33)])


@pytest.mark.parametrize(("world", "shape", "source"), CASES)
@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16], ids=str)
def test_gather(world: int, shape: tuple, source: torch.dtype, target: torch.dtype) -> None:
    shards = split(torch.randn(shape).to(source), world)
    for rank in {0, world - 1}:
        memory = torch.full((torch.Size(shape).numel() + 1,), torch.nan, dtype=target)
        out = memory[:-1].view(shape)
        gather(peers=PeerShards.of(shards, shape=shape, rank=rank), out=out, block=64)
        # The interpreter cuts fp32 off to bf16 where a GPU rounds to nearest: one unit in the last of 8 bits.
        rtol = 2**-7 if target == torch.bfloat16 != source else 0
        torch.testing.assert_close(out, gather_ref(shards, target), rtol=rtol, atol=0)
        assert memory[-1].isnan()


@pytest.mark.parametrize(("world", "shape", "dtype"), CASES)
def test_scatter(world: int, shape: tuple, dtype: torch.dtype) -> None:
    shards = split(torch.randn(shape), world)
    gradient = torch.randn(shape).to(dtype)
    want = scatter_ref(shards, gradient, 0.5)
    scatter(gradient=gradient, peers=PeerShards.of(shards, shape=shape, rank=world - 1), scale=0.5, block=64)
    # One fp32 product and one sum per element, in the same order: equal but for a fused multiply-add.
    torch.testing.assert_close(join(shards), join(want), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("sizes", "first"), [([1], 3), ([300, 0, 5], 3), ([64, 64, 1, 129], 8), ([64, 8], 8)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_gather_many(sizes: list[int], first: int, dtype: torch.dtype) -> None:
    """Bitwise: nothing is computed. Between the shards the result is unchanged."""
    shards, offsets, end = [], [], first
    for size in sizes:
        shards.append(torch.randn(size).to(dtype))
        offsets.append(end)
        end += size + 8
    out, want = torch.full((end,), 7.0, dtype=dtype), torch.full((end,), 7.0, dtype=dtype)
    listed = ShardList.of(shards, offsets)
    assert listed.even == (16 // dtype.itemsize if sizes == [64, 8] else 1)
    gather_many(shards=listed, out=out, block=64)
    for shard, offset in zip(shards, offsets, strict=True):
        want[offset : offset + len(shard)] = shard
    assert torch.equal(out, want)


def test_a_units_small_parameters_come_in_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    import odc_kernels.gather
    from odc_triton.comm.layout import ParameterSpec
    from odc_triton.engine import gathered as module
    from odc_triton.engine.transport import Streams

    monkeypatch.setattr(module, "_SMALL_SHARD_BYTES", 256)
    launches = []

    def counted(**given: object) -> None:
        launches.append(given["shards"])
        gather_many(**given)

    monkeypatch.setattr(odc_kernels.gather, "gather_many", counted)
    # Owners without rows, nothing, the largest that is small, one that is not.
    shapes = [(5, 3), (1,), (0, 3), (62, 3), (64, 3)]
    wholes = [torch.randn(shape) for shape in shapes] + [torch.arange(3)]  # kernels don't read integers
    specs = [
        ParameterSpec(
            names=(f"p{index}",),
            shape=shape,
            master_dtype="float32",
            compute_dtype="float32",
            reduce_dtype="float32",
            unit="",
        )
        for index, shape in enumerate(tuple(whole.shape) for whole in wholes)
    ]
    shards = [split(whole, 3) for whole in wholes]
    unit = module.GatheredParameters(specs, shards, rank=1, streams=Streams(), by_kernel=True)
    for publication in range(2):
        unit.fetch("me", publication)
        unit.wait()
        for got, want in zip(unit.whole, wholes, strict=True):
            assert torch.equal(got, want)
        unit.release("me")
    assert [len(shards.counts) for shards in launches] == [3 + 1 + 3] * 2
