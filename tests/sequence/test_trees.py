"""Trees over ranks give the loss, log-probabilities and gradients of plain torch and transformers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from tests.support import ranks
from tests.support.tree_cells import WORLD, Cell, Found, dense, joined, on_ranks

FP32, SHARDED = {"dtype": torch.float32}, {"backend": "cpu-sharded"}
FAST = [
    Cell(shape="a group", deal="two trees in a wave"),
    Cell(shape="a group", deal="cut completions", **SHARDED),
    Cell(shape="three levels", deal="cut completions", family="Qwen3", change="checkpointing"),
    Cell(shape="turns", deal="two waves", family="Mistral", **SHARDED),
    # Their experts, or the softmax under their softcap, compute in fp32.
    Cell(shape="another's prefix", deal="mixed", family="GptOss", **FP32),
    Cell(shape="duplicates", deal="here and there", family="Gemma2", change="checkpointing", **FP32, **SHARDED),
]
SLOW = [
    Cell(shape="three levels", deal="mixed", family="Llama", change="lora", **SHARDED),
    Cell(shape="duplicates", deal="two waves", backend="cpu-interpreter", **FP32),
]


def compare(cells: Sequence[Cell]) -> None:
    for cell, of_ranks in zip(cells, ranks.run_all(WORLD, *((on_ranks, cell) for cell in cells)), strict=True):
        assert_alike(cell, joined(of_ranks), dense(cell))


def assert_alike(cell: Cell, found: Found, want: Found) -> None:
    assert found.targets == want.targets, cell
    assert found.logps.keys() == want.logps.keys(), cell
    assert found.gradients.keys() == want.gradients.keys(), cell
    # Rounding alone. A sum of fp32 numbers in another order differs by some 1e-6 of the largest.
    tolerance = 1e-12 if cell.dtype == torch.float64 else 5e-6
    assert found.loss == pytest.approx(want.loss, rel=tolerance, abs=tolerance), cell
    for sample, logp in want.logps.items():
        torch.testing.assert_close(found.logps[sample], logp, rtol=tolerance, atol=tolerance, msg=f"{cell}: {sample}")
    for name, gradient in want.gradients.items():
        off = (found.gradients[name] - gradient).abs().max() / gradient.abs().max()
        assert off <= tolerance, f"{cell}: {name} is off by {off:.1e}"


def test_as_whole_samples() -> None:
    compare(FAST)


@pytest.mark.slow
def test_more_cells() -> None:
    compare(SLOW)
