"""linear and its input gradient on a weight that arrives while they run, against plain torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support import place  # isort: skip

from odc_kernels.linear import linear_dx_ref, linear_ref
from odc_kernels.linear_staged import linear_dx_staged, linear_staged
from odc_kernels.peers import ALL, PeerShards, shards_of
from odc_kernels.staged import StagedWeight, check, pull
from odc_kernels.tiles import LinearTile
from tests.kernels.test_matrix import TOLERANCE
from tests.support import ranks
from tests.support.deadlines import LONG_S
from tests.support.place import close

pytestmark = place.MARKS

# tokens, output features, input features: odd, one row, one token, no token, owners without rows: by pointers. The last
# two by TMA where owners have a multiple of 16 rows: whole tiles in world 1 and, of the first, 3; in 8 not.
SHAPES = [
    (5, 7, 3),
    (1, 16, 16),
    (33, 40, 18),
    (0, 4, 4),
    (4, 1, 5),
    (17, 3, 40),
    (3, 5, 0),
    (3, 0, 5),
    (33, 96, 48),
    (50, 128, 32),
]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CASES = place.matrix(SHAPES, DTYPES, mixed=[(50, 128, 32), (33, 96, 48), (5, 7, 3)])
TILE = LinearTile(t=16, n=32, k=16, group=2)


def pulled(weight: list[torch.Tensor], shape: tuple, rank: int) -> StagedWeight:
    """The weight after a pull into a buffer of NaN, but for the rows that stay zero behind the last owner's."""
    peers = PeerShards.of(weight, shape=shape, rank=rank, near=ALL)
    staged = StagedWeight.of(peers)
    staged.buffer[: shape[0]] = torch.nan
    settle()
    return pull(peers=peers, staged=staged)


def settle() -> None:
    """What tests write, they write on the current stream, for which the copies' stream does not wait."""
    if not place.INTERPRETED:
        torch.cuda.synchronize()


@pytest.mark.parametrize(("world", "shape", "dtype"), CASES)
def test_linear_and_its_gradients(world: int, shape: tuple, dtype: torch.dtype) -> None:
    tokens, rows, columns = shape
    rank = world // 2
    x, whole = torch.randn(tokens, columns).to(dtype), torch.randn(rows, columns).to(dtype)
    dy, whole_bias = torch.randn(tokens, rows).to(dtype), torch.randn(rows).to(dtype)
    weight, bias = shards_of(whole, world), shards_of(whole_bias, world)
    staged = pulled(weight, (rows, columns), rank)
    y, dx = torch.full((tokens, rows), torch.nan, dtype=dtype), torch.full((tokens, columns), torch.nan, dtype=dtype)
    with_bias = tokens != 1
    bias_peers = PeerShards.of(bias, shape=(rows,), rank=rank) if with_bias else None
    linear_staged(x=x, weight=staged, bias=bias_peers, out=y, tile=TILE)
    linear_dx_staged(dy=dy, weight=staged, out=dx, tile=TILE)
    check(staged)
    close(y, linear_ref(x, weight, bias if with_bias else None), TOLERANCE[dtype])
    close(dx, linear_dx_ref(dy, weight), TOLERANCE[dtype])


@pytest.mark.parametrize(("missing", "flag"), [(0, "of the pull before"), (1, "never set"), (2, "of the pull after")])
@pytest.mark.parametrize("columns", [32, 5])  # by TMA and by pointers
def test_an_owner_whose_rows_do_not_come(missing: int, flag: str, columns: int) -> None:
    tokens, rows, world = 33, 48, 3
    x, dy = torch.randn(tokens, columns), torch.randn(tokens, rows)
    weight = shards_of(torch.randn(rows, columns), world)
    staged = replace(pulled(weight, (rows, columns), 1), epoch=5)
    settle()
    staged.flags.fill_(5)
    staged.flags[missing] = {"never set": 0, "of the pull before": 4, "of the pull after": 6}[flag]
    y, dx = torch.zeros(tokens, rows), torch.zeros(tokens, columns)
    linear_staged(x=x, weight=staged, out=y, tile=TILE, spins=3)
    want = linear_ref(x, weight, None)
    want[:, 16 * missing : 16 * (missing + 1)] = torch.nan
    close(y, want, TOLERANCE[x.dtype])
    with pytest.raises(TimeoutError, match=f"owner {missing} of a weight .* in pull 5 "):
        check(staged)

    linear_dx_staged(dy=dy, weight=staged, out=dx, tile=TILE, spins=3)
    assert dx.isnan().all()
    with pytest.raises(TimeoutError, match=f"owner {missing} "):
        check(staged)
    check(staged)  # told once


SHAPE, WAIT_S = (64, 32), 0.15


def _late(rank: int, world: int) -> dict[str, torch.Tensor]:
    """Rank 0 runs each kernel at once; rank 1 writes the rows of four owners and their flags meanwhile, slowly."""
    import time

    import torch.distributed as dist

    from odc_triton.comm.layout import Region
    from odc_triton.comm.memory.heap import SharedMemoryHeap

    buffer = Region(shape=SHAPE, dtype="float32", itemsize=4, offset_bytes=0)
    flags = Region(shape=(8,), dtype="float32", itemsize=4, offset_bytes=12288)
    heap = SharedMemoryHeap(rank=rank, world=world, size_bytes=16384, locks=1, token="late", timeout_s=LONG_S)
    x, dy, weight = late_inputs()
    staged = StagedWeight(
        buffer=heap.whole(buffer),
        flags=heap.whole(flags).view(torch.int32)[:4],
        status=torch.zeros(1, dtype=torch.int32),
        epoch=7,
        shape=SHAPE,
        rank=2,
        world=4,
    )
    launches = {
        "linear": (SHAPE[0], lambda out: linear_staged(x=x, weight=staged, out=out, tile=TILE)),
        "linear_dx": (SHAPE[1], lambda out: linear_dx_staged(dy=dy, weight=staged, out=out, tile=TILE)),
    }
    found = {}
    for name, (columns, launch) in launches.items():
        if rank == 0:
            staged.buffer.fill_(torch.nan)
            staged.flags.fill_(6)
        dist.barrier()
        if rank == 0:
            assert staged.flags.tolist() == [6] * 4, "the kernel must start before the rows come"
            launch(found.setdefault(name, torch.zeros(33, columns)))
            check(staged)
        else:
            for owner in (2, 3, 0, 1):
                time.sleep(WAIT_S)
                staged.buffer[owner * 16 : (owner + 1) * 16] = weight[owner]
                staged.flags[owner] = 7
        dist.barrier()
    return found


def late_inputs() -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    random = torch.Generator().manual_seed(3)
    x, dy = torch.randn(33, SHAPE[1], generator=random), torch.randn(33, SHAPE[0], generator=random)
    return x, dy, shards_of(torch.randn(SHAPE, generator=random), 4)


@pytest.mark.skipif(not place.INTERPRETED, reason="a stream operation sets the flags on a GPU")
def test_kernels_wait_for_rows_that_another_process_writes_late() -> None:
    x, dy, weight = late_inputs()
    found = ranks.run(_late, 2)[0]
    close(found["linear"], linear_ref(x, weight, None), TOLERANCE[x.dtype])
    close(found["linear_dx"], linear_dx_ref(dy, weight), TOLERANCE[x.dtype])
