"""embedding and its gradient against plain torch, over all owners' shards and on the joined table."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.nn import functional

from tests.support import place  # isort: skip

from odc_kernels.embedding import (
    EmbeddingGradTile,
    EmbeddingTile,
    embedding,
    embedding_grad,
    embedding_grad_ref,
    embedding_ref,
)
from odc_kernels.peers import PeerShards, join
from tests.support.place import close, split

pytestmark = place.MARKS

# tokens, vocabulary, columns: odd, one token, no token, one row, owners without rows, no row, no column, more than a
# tile, and runs of several segments.
SHAPES = [(13, 7, 5), (1, 16, 16), (0, 4, 4), (5, 1, 3), (9, 3, 40), (3, 0, 4), (3, 4, 0), (40, 11, 33), (70, 4, 8)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CASES = place.matrix(SHAPES, DTYPES, mixed=[(40, 11, 33)])
TILE = EmbeddingTile(k=16)
GRAD_TILE = EmbeddingGradTile(t=2, k=16, segment=8)

# Gradients are summed in fp32 whatever dy is: up to some 70 terms in another order than float64's.
TOLERANCE = 1e-5


@contextmanager
def launched_blind() -> Iterator[None]:
    """On a GPU torch raises where it waits for the device, and NaN stands in memory that nobody wrote."""
    if not place.INTERPRETED:
        torch.cuda.set_sync_debug_mode("error")
    torch.use_deterministic_algorithms(True)  # fills torch.empty with NaN: here the scratch buffer
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        if not place.INTERPRETED:
            torch.cuda.set_sync_debug_mode("default")


def ids_of(tokens: int, rows: int) -> torch.Tensor:
    """Any ids, also outside 0..rows-1: just outside and far."""
    ids = torch.randint(-1, rows + 1, (tokens,))
    ids[1::7] = torch.tensor([-(2**31), rows + 2, 2**31 - 1, -rows - 3]).repeat(tokens)[: len(ids[1::7])]
    return ids


def grad(shards: list[torch.Tensor], dy: torch.Tensor, ids: torch.Tensor, **options: object) -> None:
    shape = (sum(len(shard) for shard in shards), dy.shape[1])
    weight = PeerShards.of(shards, shape=shape, rank=len(shards) // 2)
    with launched_blind():
        embedding_grad(**{"dy": dy, "ids": ids, "weight": weight, "tile": GRAD_TILE} | options)


@pytest.mark.parametrize(("world", "shape", "dtype"), CASES)
def test_embedding(world: int, shape: tuple, dtype: torch.dtype) -> None:
    tokens, rows, columns = shape
    whole = torch.randn(rows, columns).to(dtype)
    shards, ids = split(whole, world), ids_of(tokens, rows)
    weight = PeerShards.of(shards, shape=(rows, columns), rank=world // 2)
    for index_dtype in (torch.int64, torch.int32) if world == 3 else (torch.int64,):
        out = torch.full((tokens, columns), torch.inf, dtype=dtype)  # NaN would be right for ids outside
        embedding(ids=ids.to(index_dtype), weight=weight, out=out, tile=TILE)
        # A copy: bitwise. Ids outside are NaN in both.
        torch.testing.assert_close(out.double(), embedding_ref(ids, shards), rtol=0, atol=0, equal_nan=True)
    known = (ids >= 0) & (ids < rows)
    assert torch.equal(out[known], functional.embedding(ids[known], whole))
    assert out[~known].isnan().all()


@pytest.mark.parametrize(("world", "shape", "dtype"), CASES)
def test_gradient(world: int, shape: tuple, dtype: torch.dtype) -> None:
    tokens, rows, columns = shape
    shards, ids, dy = split(torch.randn(rows, columns), world), ids_of(tokens, rows), torch.randn(tokens, columns)
    padding_idx = rows // 2 if rows > 1 and dtype == torch.float32 else None
    want = join(embedding_grad_ref(dy.to(dtype), ids, shards, 0.5, padding_idx))
    grad(shards, dy.to(dtype), ids, scale=0.5, padding_idx=padding_idx)
    close(join(shards), want, TOLERANCE)


@pytest.mark.parametrize(
    ("padding_idx", "index_dtype"), [(None, torch.int32), (0, torch.int64), (10, torch.int64)], ids=str
)
def test_gradient_is_autograds(padding_idx: int | None, index_dtype: torch.dtype) -> None:
    # Half of the tokens are one id, as padding is: a run of several segments beside short ones.
    ids, dy = torch.randint(0, 11, (40,)), torch.randn(40, 20)
    ids[::2] = 10
    whole = torch.randn(11, 20, dtype=torch.float64, requires_grad=True)
    functional.embedding(ids, whole, padding_idx=padding_idx).backward(dy.double())
    shards = split(torch.zeros(11, 20), 3)
    grad(shards, dy, ids.to(index_dtype), padding_idx=padding_idx)
    close(join(shards), whole.grad, TOLERANCE)


def test_runs_around_the_length_of_a_segment() -> None:
    # Side by side, beginning at any place in a segment. Small integers: every sum is exact.
    lengths = [3, 1, 7, 8, 9, 15, 16, 17, 24, 25, 65]
    ids = torch.cat([torch.full((count,), row) for row, count in enumerate(lengths)])
    ids = ids[torch.randperm(len(ids))]
    dy = torch.randint(-3, 4, (len(ids), 17)).float()
    shards = split(torch.zeros(len(lengths), 17), 2)
    want = join(embedding_grad_ref(dy, ids, shards, 1.0, None))
    grad(shards, dy, ids)
    assert torch.equal(join(shards).double(), want)


@pytest.mark.parametrize(("repeats", "held"), [(8, 2**24), (64, 2**28)], ids=["one segment", "several segments"])
def test_an_id_is_added_to_its_owner_once(repeats: int, held: int) -> None:
    # The shard holds so much that 1.0 is lost beside it, and so is a segment of 8 beside 2^28: what arrives, arrived
    # in one addition.
    shards = split(torch.full((5, 4), float(held)), 2)
    ids = torch.full((repeats + 2,), 3)
    ids[[2, 5]] = torch.tensor([0, 4])
    grad(shards, torch.ones(repeats + 2, 4), ids)
    assert torch.equal(join(shards)[:, 0] - held, torch.tensor([0.0, 0, 0, repeats, 0]))


def test_addresses_past_two_to_the_31() -> None:
    # A table says that a shard begins 2^31 elements before the one row that there is.
    rows, columns = 2**20 + 1, 2**11
    for dtype in (torch.bfloat16, torch.float32):
        row = torch.randn(1, columns).to(dtype)
        before = 2**31 * row.element_size()
        table = torch.tensor([row.data_ptr() - before], dtype=torch.int64)
        weight = PeerShards(table=table, shape=(rows, columns), rank=0, dtype=row.dtype, near=frozenset({0}))
        ids, out = torch.tensor([rows - 1, rows]), torch.zeros(2, columns, dtype=dtype)
        embedding(ids=ids, weight=weight, out=out)
        assert torch.equal(out[0], row[0])
        assert out[1].isnan().all()
    want = row[0] + 1
    embedding_grad(dy=torch.ones(2, columns), ids=ids, weight=weight)
    assert torch.equal(row[0], want)
