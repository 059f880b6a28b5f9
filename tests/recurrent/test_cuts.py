"""Hybrid models' samples, cut over ranks, give the loss and gradients of unsplit samples by plain transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from odc_triton import enable_split, fully_shard, minibatch, repeating
from odc_triton.balance import PackedDataset, pack_collate
from odc_triton.hf import enable_packing, summed_loss
from odc_triton.plan.plan import Plan
from tests.recurrent.test_packs import ENTRIES, ROOT, tree
from tests.support import ranks
from tests.support.families import with_lora
from tests.support.gradients import assert_same_gradients
from tests.support.hybrids import FAST, HYBRIDS, hybrid, lacking, one_by_one, rules_in, tokens
from tests.support.parity import TRANSFORMS
from tests.support.splitting import DEALS, IGNORED, LENGTHS, Dealt, P, gradients

FP32, FP64 = torch.float32, torch.float64
Result = tuple[float, dict[str, torch.Tensor]]
SHARED = 8  # the tokens with which all samples of "tree" and its like begin
_ROOT_CUT = [P(0, 0, 9), P(0, 9, ROOT)]
_BRANCH = {each.sample: each for each in ENTRIES}

# By rank and pack.
CUTS: dict[str, Dealt] = {
    "two": DEALS["two"],
    "one token first": DEALS["one token first"],
    "one token last": DEALS["one token last"],
    "three": [[[P(0, 0, 14), 3]], [[P(0, 14, 27)], [1]], [[P(0, 27, 41), 2]]],
    # Segments shorter than the convolution's kernel: the rows before the next one are of two segments, or too few.
    "one token between": [[[P(0, 0, 20)], [1]], [[P(0, 20, 21), 3]], [[P(0, 21, 41)], [2]]],
    "two tokens, then one": [[[P(0, 0, 2), 1]], [[P(0, 2, 3)], [3]], [[P(0, 3, 41)], [2]]],
    "one token each": [[[P(0, 0, 1), P(0, 3, 4), 3]], [[P(0, 1, 2), P(0, 4, 41)], [1]], [[P(0, 2, 3), 2]]],
    "in both orders": DEALS["zigzag"],
    "rounds": [
        [[P(0, 0, 14)], [P(1, 0, 9)], [P(2, 20, 30)]],
        [[P(0, 14, 28)], [3], [P(2, 0, 10)]],
        [[P(0, 28, 41)], [P(1, 9, 17)], [P(2, 10, 20)]],
    ],
    "two samples in a round": [
        [[P(0, 0, 13), P(2, 18, 30)]],
        [[P(0, 13, 28), P(2, 9, 18)], [1]],
        [[P(2, 0, 9), P(0, 28, 41)], [3]],
    ],
    "unequal counts": [[[P(0, 0, 30)]], [[P(0, 30, 41)], [1], [2], [3]]],
    "a rank without work": [[[P(0, 0, 20), 1]], [[P(0, 20, 41), 2], [3]], []],
    "a rank without segments": [[[P(0, 0, 20), 1]], [[P(0, 20, 41), 2]], [[3]]],
    "whole samples": [[[0, 1], [2]], [[3]]],
    # Prefixes.
    "tree": DEALS["tree"],
    "cut tree": DEALS["cut tree"],
    "tree in rounds": DEALS["tree waves"],
    "tree within a pack, beside segments": [[[P(1, 0, 17), P(0, 0, 24), P(3, 7, 9, 1)]], [[2, P(0, 24, 41)]]],
    "branches of branches": [
        [[_ROOT_CUT[0], _BRANCH[2], _BRANCH[4]]],
        [[_ROOT_CUT[1], _BRANCH[6], _BRANCH[8]]],
        [[_BRANCH[1], _BRANCH[3], _BRANCH[5], _BRANCH[7]]],
    ],
    "cut branches": [
        [[P(0, 0, ROOT), P(7, 9, 40)]],
        [[P(7, 8, 9, 0), _BRANCH[1], P(2, 12, 16)]],
        [[P(7, 40, 74), P(2, 10, 12, 1), *(_BRANCH[at] for at in (3, 4, 5, 6, 8))]],
    ],
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """`cut`: in CUTS; `change`: as in TRANSFORMS; `in_flight`: layers that have buffers at a time."""

    name: str
    cut: str
    change: str = "none"
    dtype: torch.dtype = FP64
    backend: str = "cpu"
    in_flight: int | None = None
    exact: bool = False


def samples(cut: str) -> list[dict[str, Any]]:
    if "branches" in cut:
        return tree()
    shared = tokens(SHARED, 99) if "tree" in cut else []
    made = [{"input_ids": shared + tokens(length - len(shared), at)} for at, length in enumerate(LENGTHS)]
    return [each | {"labels": [IGNORED] * len(shared) + each["input_ids"][len(shared) :]} for each in made]


def build(row: Row) -> nn.Module:
    model = hybrid(row.name, dtype=row.dtype)
    if row.change == "decay":  # trains alone: no input of the first layer's rule needs a gradient
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.endswith("A_log"))
        return model
    *adapted, change = row.change.split("+")
    # Of attention, recurrent layers and MLPs. PEFT refuses Mamba's out_proj.
    targets = ("q_proj", "v_proj", "in_proj", "in_proj_qkv", "up_proj")
    return TRANSFORMS[change](with_lora(model, targets).to(row.dtype) if adapted else model)


def on_ranks(rank: int, world: int, row: Row, dealt: Dealt | None = None) -> Result:
    """This rank's part of the loss, and the gradients of all, of the targets' sum."""
    model = build(row)
    with rules_in(row.dtype):
        enable_packing(model)
        model = fully_shard(model, backend=row.backend, exact=row.exact)
        enable_split(model, tokens=96, layers_in_flight=row.in_flight)
        entries = Plan.by_hand(dealt or CUTS[row.cut]).packs(rank)
        packs = pack_collate(PackedDataset(samples(row.cut)).__getitems__(entries))
        return repeating(lambda: _minibatch(model, packs)) if row.exact else _minibatch(model, packs)


def _minibatch(model: nn.Module, packs: Any) -> Result:
    total = 0.0
    with minibatch(model, plan=packs) as mb:
        for pack in packs:
            loss = summed_loss(model, pack)
            (loss / mb.tokens).backward()
            total += loss.item()
        targets = mb.tokens
    return total, {name: gradient * targets for name, gradient in gradients(model).items()}


def compare(*given: Row) -> None:
    """Rows of as many ranks run in one launch of them; without those that this transformers lacks."""
    torch.set_num_threads(1)
    if not (rows := [row for row in given if not lacking(row.name)]):
        pytest.skip("this transformers has none of them")
    by_world: dict[int, list[Row]] = {}
    for row in rows:
        by_world.setdefault(len(CUTS[row.cut]), []).append(row)
    for world, alike in by_world.items():
        for row, of_ranks in zip(alike, ranks.run_all(world, *((on_ranks, row) for row in alike)), strict=True):
            assert_whole(row, of_ranks)


def assert_whole(row: Row, of_ranks: list[Result]) -> None:
    model = build(row)
    with rules_in(row.dtype):
        want = one_by_one(model, samples(row.cut))
    tolerance = 1e-10 if row.dtype is FP64 else 2e-5
    assert sum(loss for loss, _ in of_ranks) == pytest.approx(want.loss, rel=tolerance), row
    for _, found in of_ranks:
        assert_same_gradients(found, want.gradients, tolerance, floor=1e-3 * tolerance)


def test_as_whole_samples() -> None:
    compare(
        Row(name="qwen3_5", cut="one token between", change="checkpointing"),
        Row(name="nemotron_h", cut="branches of branches", backend="cpu-sharded"),
    )


SLOW = {
    **{f"cut {cut}": [Row(name=name, cut=cut) for name in FAST] for cut in CUTS},
    **{
        f"family {name}": [
            Row(name=name, cut="one token between"),
            Row(name=name, cut="in both orders", change="checkpointing", backend="cpu-sharded"),
            Row(name=name, cut="two", dtype=FP32),
            Row(name=name, cut="cut tree"),
            Row(name=name, cut="branches of branches", change="checkpointing"),
        ]
        for name in HYBRIDS
    },
    "changes": [
        Row(name="nemotron_h", cut="two", change="decay"),
        Row(name="qwen3_5", cut="in both orders", change="frozen", backend="cpu-sharded"),
        Row(name="qwen3_5", cut="three", change="layers"),
        Row(name="qwen3_5", cut="cut tree", change="checkpointing", dtype=FP32, backend="cpu-interpreter"),
        Row(name="lfm2", cut="in both orders", dtype=FP32, backend="cpu-interpreter"),
        Row(name="qwen3_5", cut="rounds", change="reentrant"),
        Row(name="qwen3_5", cut="in both orders", change="lora+none"),
        Row(name="nemotron_h", cut="cut tree", change="lora+checkpointing", backend="cpu-sharded"),
        *(Row(name=name, cut="rounds", change="checkpointing", in_flight=1) for name in FAST),
        *(Row(name=name, cut="tree in rounds", change="checkpointing", in_flight=2) for name in FAST),
        *(Row(name=name, cut="cut branches", change="checkpointing", backend="cpu-sharded") for name in FAST),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("rows", SLOW.values(), ids=SLOW)
def test_every_family_and_cut(rows: list[Row]) -> None:
    compare(*rows)


# The same packs on other ranks, and in another order.
ASSIGNED: list[Dealt] = [
    [[[P(0, 0, 20)], [1]], [[P(0, 20, 41)], [2], [3]]],
    [[[P(0, 0, 20)], [2]], [[P(0, 20, 41)], [3], [1]]],
    [[[P(0, 20, 41)], [3], [2]], [[P(0, 0, 20)], [1]]],
]


@pytest.mark.slow
@pytest.mark.parametrize("name", FAST)
def test_exact_sums_have_the_same_bits(name: str) -> None:
    if reason := lacking(name):
        pytest.skip(reason)
    row = Row(name=name, cut="two", dtype=FP32, exact=True)
    runs = ranks.run_all(2, *((on_ranks, row, dealt) for dealt in ASSIGNED))
    want = runs[0][0][1]
    for _, found in (each for of_ranks in runs for each in of_ranks):
        for key, gradient in want.items():
            assert torch.equal(found[key], gradient), key
    assert_whole(row, runs[0])
