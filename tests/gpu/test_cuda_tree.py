"""Attention of trees by torch's FlashAttention on a GPU, against one mask over all keys."""

from __future__ import annotations

import pytest
import torch

from odc_triton.sequence.flash import FlashAttentionOfTree
from tests.gpu.marks import MARKS
from tests.support.trees import CASES, GivenRows, Tree, dense, random_tree, tensors_of, with_gradients

pytestmark = MARKS
LONG = [random_tree(seed, longest=300) for seed in range(4)]  # several blocks of the kernel


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("tree", [*CASES.values(), *LONG], ids=[*CASES, *map(str, range(len(LONG)))])
def test_as_with_a_mask(tree: Tree, dtype: torch.dtype, width: int) -> None:
    given = tensors_of(tree, dtype, "cuda", width)
    want = with_gradients({name: each.float() for name, each in given.items()}, lambda *qkv: dense(tree, None, *qkv))
    poison = torch.full((1 << 26,), torch.nan, device="cuda")  # what the kernel doesn't write shall show
    del poison
    found = with_gradients(
        given, lambda q, k, v, *more: FlashAttentionOfTree.apply(q, k, v, tree.parts, None, GivenRows(*more))
    )
    for name, each in want.items():
        # bf16 has 8 bits, and sums of some hundred products of it are rounded once in each part.
        assert (found[name].float() - each).norm() <= 2e-2 * each.norm(), name


def test_the_host_does_not_wait() -> None:
    query, keys, values, *before = (
        each.requires_grad_() for each in tensors_of(CASES["fetched"], torch.bfloat16, "cuda", 64).values()
    )
    seed = torch.randn_like(query)
    for mode in ("default", "error"):  # the kernels are loaded in the first round
        torch.cuda.set_sync_debug_mode(mode)
        try:
            out = FlashAttentionOfTree.apply(query, keys, values, CASES["fetched"].parts, None, GivenRows(*before))
            out.backward(seed)
        finally:
            torch.cuda.set_sync_debug_mode("default")
