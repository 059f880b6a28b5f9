"""Attention of trees by FlashAttention: a stand-in for its operators, which need a GPU, and torch's own on meta."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from odc_triton.sequence import flash
from odc_triton.sequence.attention import Pair
from odc_triton.sequence.flash import FlashAttentionOfTree, calls_of
from tests.support.flash import Flash
from tests.support.trees import CASES, GivenRows, Tree, dense, random_tree, tensors_of, with_gradients

SCALE = 0.3


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Flash:
    kernel = Flash(empty=getattr(request, "param", torch.inf))
    monkeypatch.setattr(flash, "_forward", kernel.forward)
    monkeypatch.setattr(flash, "_backward", kernel.backward)
    return kernel


@pytest.mark.parametrize("scale", [None, SCALE])
@pytest.mark.parametrize("kernel", [torch.inf, -torch.inf], ids=["flash-2", "flash-3"], indirect=True)
@pytest.mark.parametrize("tree", [*CASES.values(), *map(random_tree, range(12))], ids=[*CASES, *map(str, range(12))])
def test_as_with_a_mask(tree: Tree, kernel: Flash, scale: float | None) -> None:
    given = tensors_of(tree, torch.float64)
    want = with_gradients(given, lambda *qkv: dense(tree, scale, *qkv))
    found = with_gradients(
        given, lambda q, k, v, *more: FlashAttentionOfTree.apply(q, k, v, tree.parts, scale, GivenRows(*more))
    )
    for name, each in want.items():
        assert (found[name] - each).abs().max() <= 1e-12 * each.abs().max() + 1e-14, name


@pytest.mark.parametrize(
    ("name", "calls"),
    [("alone", 1), ("a group", 2), ("queries and keys between", 2), ("two levels", 3), ("fetched", 4)],
)
@pytest.mark.parametrize("rows_first", [True, False])
def test_no_key_is_copied(name: str, calls: int, rows_first: bool, kernel: Flash) -> None:
    """A call of the kernel has views of what was given, however it is laid out; there is one per depth and source."""
    given = tensors_of(CASES[name], torch.float64).values()
    query, keys, values, *before = (each if rows_first else each.contiguous() for each in given)
    rows = (query.requires_grad_(), keys, values)
    out = FlashAttentionOfTree.apply(*rows, CASES[name].parts, None, GivenRows(*before))
    out.backward(torch.ones_like(query))
    assert len(kernel.calls) == 2 * calls
    for at, all_of in enumerate(((keys, *before[::2]), (values, *before[1::2]))):
        assert {_storage(call[at]) for call in kernel.calls} == {_storage(each) for each in all_of}


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def test_gradients_are_added_in_fp32(kernel: Flash, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16 1 + 2^-8 is 1."""

    def gradients(_: Tensor, *qkv: Any, **scale: Any) -> tuple[Tensor, ...]:
        return tuple(torch.full_like(each, 1.0 if qkv[-3] else 2**-8) for each in qkv[:3])

    monkeypatch.setattr(flash, "_backward", gradients)
    query, keys, values = tensors_of(CASES["two levels"], torch.bfloat16).values()
    out = FlashAttentionOfTree.apply(query.requires_grad_(), keys, values, CASES["two levels"].parts, None, None)
    (found,) = torch.autograd.grad(out, query, torch.ones_like(out))
    assert found[0, 0, :, 0].tolist() == [1.0] * 9 + [1 + 2**-7] * 6 + [1.0] * 3


def test_it_asks_for_what_is_fetched_after_the_parts_of_the_pack(kernel: Flash) -> None:
    query, keys, values, *before = tensors_of(CASES["fetched"], torch.float64).values()
    asked: list[int] = []

    class Asked(GivenRows):
        def each(self, *, backward: bool = False) -> Iterator[tuple[int, Pair]]:
            for each in super().each():
                asked.append(len(kernel.calls))
                yield each

    FlashAttentionOfTree.apply(query, keys, values, CASES["fetched"].parts, None, Asked(*before))
    assert asked == [2, 3]


def test_fetched_parts_come_last_and_queries_without_keys_between() -> None:
    calls = calls_of(CASES["fetched"].parts)
    assert [call.source for call in calls] == [0, 0, 1, 2]
    between = calls_of(CASES["queries and keys between"].parts)[1]
    assert between.ends == [(6, 0), (9, 6), (14, 6), (14, 9), (18, 13)]


@pytest.mark.parametrize("tree", CASES.values(), ids=CASES)
def test_torch_takes_the_calls(tree: Tree) -> None:
    """Torch's own operators, whose arguments and shapes need no GPU."""
    leaves = [each.requires_grad_() for each in tensors_of(tree, torch.bfloat16, "meta").values()]
    query, keys, values, *before = leaves
    out = FlashAttentionOfTree.apply(query, keys, values, tree.parts, None, GivenRows(*before))
    assert (out.shape, out.dtype) == (query.shape, query.dtype)
    assert out.grad_fn.saved_tensors[-1].dtype == torch.float32
    out.backward(torch.empty_like(out))
    for leaf in leaves:
        assert (leaf.grad.shape, leaf.grad.dtype) == (leaf.shape, leaf.dtype)
