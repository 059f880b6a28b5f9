"""Trees over ranks give the loss, log-probabilities and gradients of whole samples by plain torch and transformers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import pytest
import torch

from tests.support import ranks
from tests.support.relatives import DEALS, SHAPES
from tests.support.tree_cells import (
    CHANGES,
    IMPORTANCE,
    LOSSES,
    MODELS,
    WORLD,
    Cell,
    Found,
    dense,
    joined,
    on_ranks,
)

# Their experts, or the softmax under their softcap, compute in fp32.
IN_FP32 = ("Gemma2", "GptOss")
AXES: dict[str, Sequence[str]] = {
    "shape": tuple(SHAPES),
    "deal": tuple(DEALS),
    "family": MODELS,
    "change": CHANGES,
    "loss": LOSSES,
    "importance": IMPORTANCE,
}


def pairwise(axes: Mapping[str, Sequence[str]]) -> Iterator[dict[str, str]]:
    """Rows in which each two values of different axes meet at least once."""
    left = {
        pair
        for one, other in itertools.combinations(axes, 2)
        for pair in itertools.product(((one, value) for value in axes[one]), ((other, value) for value in axes[other]))
    }
    while left:
        row = dict(min(left))
        for name in (name for name in axes if name not in row):
            row[name] = max(axes[name], key=lambda value: len(left & _pairs(axes, row | {name: value})))
        left -= _pairs(axes, row)
        yield row


def _pairs(axes: Mapping[str, Sequence[str]], row: Mapping[str, str]) -> set[tuple[tuple[str, str], ...]]:
    return set(itertools.combinations([(name, row[name]) for name in axes if name in row], 2))


def cell_of(row: Mapping[str, str], number: int) -> Cell:
    """In fp64 where the model has it, on two backends in turn."""
    cell = Cell(**row, backend=("cpu", "cpu-sharded")[number % 2])
    if cell.loss == "sft":
        cell = replace(cell, importance="none")
    exact = cell.family not in IN_FP32 and cell.change != "autocast"
    return cell if exact else replace(cell, dtype=torch.float32)


CELLS = [cell_of(row, number) for number, row in enumerate(pairwise(AXES))]
FAST = [
    cell_of(dict(zip(AXES, row, strict=True)), number)
    for number, row in enumerate(
        [
            ("a group", "two trees in a wave", "Qwen2", "none", "gspo", "none"),
            ("a group", "cut completions", "Qwen2", "none", "gspo", "token_mask"),
            ("three levels", "cut completions", "Qwen3", "checkpointing", "dapo", "sequence_mask"),
            ("turns", "two waves", "Mistral", "none", "kl", "token_mask"),
            ("another's prefix", "mixed", "GptOss", "none", "grpo", "sequence_truncate"),
            ("duplicates", "here and there", "Gemma2", "checkpointing", "cispo", "none"),
            ("nothing shared", "a cut prefix and branch", "Llama", "autocast", "gspo", "none"),
        ]
    )
]


def compare(cells: Sequence[Cell]) -> None:
    for cell, of_ranks in zip(cells, ranks.run_all(WORLD, *((on_ranks, cell) for cell in cells)), strict=True):
        assert_alike(cell, joined(of_ranks), dense(cell))


def assert_alike(cell: Cell, found: Found, want: Found) -> None:
    assert found.targets == want.targets, cell
    assert found.logps.keys() == want.logps.keys(), cell
    assert found.gradients.keys() == want.gradients.keys(), cell
    if cell.change == "autocast":
        _assert_as_good(cell, found, want)
        return
    # Rounding alone. A sum of fp32 numbers in another order differs by some 1e-6 of the largest.
    tolerance = 1e-12 if cell.dtype == torch.float64 else 5e-6
    assert found.loss == pytest.approx(want.loss, rel=tolerance, abs=tolerance), cell
    assert found.sums == pytest.approx(want.sums, rel=tolerance), cell
    for sample, logp in want.logps.items():
        torch.testing.assert_close(found.logps[sample], logp, rtol=tolerance, atol=tolerance, msg=f"{cell}: {sample}")
    for name, gradient in want.gradients.items():
        off = (found.gradients[name] - gradient).abs().max() / gradient.abs().max()
        assert off <= tolerance, f"{cell}: {name} is off by {off:.1e}"


def _assert_as_good(cell: Cell, found: Found, want: Found) -> None:
    """bf16 rounds other partial sums in each: both are about as far from fp32."""
    exact = dense(replace(cell, change="none"))

    def off(one: Found) -> float:
        squares = sum((one.gradients[name] - each).square().sum() for name, each in exact.gradients.items())
        return float(squares.sqrt())

    assert 0 < off(found) <= 1.3 * off(want), cell
    for sample, logp in exact.logps.items():
        apart = (found.logps[sample] - logp).abs().max()
        assert apart <= 2 * max((each - exact.logps[at]).abs().max() for at, each in want.logps.items()), cell


def test_as_whole_samples() -> None:
    compare(FAST)


@pytest.mark.slow
@pytest.mark.parametrize("family", MODELS)
def test_every_pair(family: str) -> None:
    compare([cell for cell in CELLS if cell.family == family])


@pytest.mark.slow
@pytest.mark.parametrize("family", [each for each in MODELS if each not in IN_FP32])
def test_every_pair_in_fp32_where_kernels_add(family: str) -> None:
    how = {"dtype": torch.float32, "backend": "cpu-interpreter"}
    compare([replace(cell, **how) for cell in CELLS if cell.family == family and cell.dtype == torch.float64])
