"""Which rank owns which rows, and where they lie."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from odc_triton.comm.layout import (
    ALIGNMENT_BYTES,
    MemoryLayout,
    ParameterSpec,
    find_units,
    first_difference,
    make_layout,
    shard_rows,
)

ITEMSIZES = {"float32": 4, "bfloat16": 2, "float64": 8}
quick = settings(deadline=None, max_examples=100)

shapes = st.lists(st.integers(0, 9), min_size=1, max_size=4).map(tuple)
specs = st.builds(
    ParameterSpec,
    names=st.text("abc.", min_size=1, max_size=5).map(lambda name: (name,)),
    shape=shapes,
    master_dtype=st.sampled_from(sorted(ITEMSIZES)),
    compute_dtype=st.sampled_from(sorted(ITEMSIZES)),
    reduce_dtype=st.sampled_from([None, *sorted(ITEMSIZES)]),
    unit=st.just(""),
)


@quick
@given(rows=st.integers(0, 200), world=st.integers(1, 17))
def test_rows_are_torch_chunks(rows: int, world: int) -> None:
    chunks = torch.arange(rows).chunk(world) if rows else ()
    want = [chunk.tolist() for chunk in chunks] + [[]] * (world - len(chunks))
    assert [list(range(*shard_rows(rows, world, rank))) for rank in range(world)] == want


@pytest.mark.parametrize("classes", [(), ("Block",)])
def test_each_of_twelve_blocks_is_a_unit(classes: tuple[str, ...]) -> None:
    """Not layers.10 a part of layers.1; of nested blocks the outermost."""

    class Block(torch.nn.ModuleList):
        pass

    model = torch.nn.Module()
    model._no_split_modules = classes
    model.layers = torch.nn.ModuleList(Block([Block()]) if classes else torch.nn.Identity() for _ in range(12))
    assert find_units(model) == [f"layers.{number}" for number in range(12)]


def _plan(parameters: list[ParameterSpec], world: int) -> MemoryLayout:
    return make_layout(parameters, world=world, itemsizes=ITEMSIZES)


@quick
@given(parameters=st.lists(specs, max_size=8), world=st.integers(1, 5))
def test_regions(parameters: list[ParameterSpec], world: int) -> None:
    plan = _plan(parameters, world)
    end = 0
    for region in [*plan.compute, *(region for region in plan.gradient if region is not None)]:
        assert region.offset_bytes % ALIGNMENT_BYTES == 0
        assert region.offset_bytes >= end  # so no two overlap
        end = region.offset_bytes + region.size_bytes
    assert plan.size_bytes == end == plan.compute_bytes + plan.gradient_bytes
    for spec, compute, gradient in zip(parameters, plan.compute, plan.gradient, strict=True):
        assert compute.shape == spec.shape
        assert (gradient is None) == (spec.reduce_dtype is None)
        for region in (compute, gradient):
            if region is None:
                continue
            offset = region.offset_bytes
            for owner in range(world):  # the shards tile the whole, in the order of their owners
                shard = region.shard(world, owner)
                assert shard.shape[1:] == spec.shape[1:]
                assert shard.elements == 0 or shard.offset_bytes == offset
                offset += shard.size_bytes
            assert offset == region.offset_bytes + math.prod(spec.shape) * region.itemsize


def test_offsets_beyond_32_bits() -> None:
    spec = ParameterSpec(
        names=("w",),
        shape=(2**17, 2**15),
        master_dtype="float32",
        compute_dtype="bfloat16",
        reduce_dtype="float32",
        unit="",
    )
    plan = _plan([spec, spec], 2)
    assert plan.size_bytes == 2 * 2**32 * (2 + 4)
    last = plan.gradient[1].shard(2, 1)
    assert last.offset_bytes + last.size_bytes == plan.size_bytes


@quick
@given(first=st.lists(specs, max_size=3), second=st.lists(specs, max_size=3))
def test_fingerprints_differ_exactly_if_the_plans_do(first: list[ParameterSpec], second: list[ParameterSpec]) -> None:
    (mine, my_lines), (theirs, their_lines) = (_plan(p, 2).fingerprint({"a": 1}) for p in (first, second))
    assert (mine == theirs) == (first == second)
    if mine != theirs:
        assert first_difference(my_lines, their_lines)
