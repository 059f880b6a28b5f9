"""GRPO batches as rows and back; how they are assigned; how packs' metrics merge. Without ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from odc_triton.balance import CostModel
from odc_triton.jobs.trainers.grpo_rows import assign_rows, batch_of, counted, rows_of
from odc_triton.jobs.trainers.trl_metrics import Alone, PackMetrics, merged

CPU = torch.device("cpu")
PROMPTS = [[5, 6, 7], [8], [9, 10]]
COMPLETIONS = [[11], [12, 13, 14], []]  # the last was truncated, and is masked


def _batch(**more: Any) -> dict[str, Any]:
    prompts = torch.tensor([[5, 6, 7], [0, 0, 8], [0, 9, 10]])
    completions = torch.tensor([[11, 0, 0], [12, 13, 14], [15, 16, 17]])
    mask = torch.tensor([[1, 0, 0], [1, 1, 1], [0, 0, 0]])
    batch = {"prompt_ids": prompts, "prompt_mask": (prompts > 0).long(), "completion_ids": completions}
    return batch | {"completion_mask": mask, "num_items_in_batch": torch.tensor(4)} | more


def test_rows_and_back() -> None:
    logps = torch.tensor([[-1.0, 0, 0], [-2, -3, -4], [0, 0, 0]])
    batch = _batch(
        advantages=torch.tensor([0.5, -0.5, 0.0]),
        old_per_token_logps=logps,
        importance_sampling_ratio=torch.tensor([[2.0], [3.0], [4.0]]),  # of whole completions
        tool_mask=torch.tensor([[1, 1, 1], [1, 0, 1], [1, 1, 1]]),
        pixel_values=None,
    )
    rows, shared = rows_of(batch)
    assert [row["prompt_ids"].tolist() for row in rows] == PROMPTS
    assert [row["completion_ids"].tolist() for row in rows] == COMPLETIONS
    assert [counted([row]) for row in rows] == [1, 2, 0]
    assert shared == {"num_items_in_batch": torch.tensor(4)}
    again = batch_of(rows, shared, CPU)
    for name in batch.keys() - {"completion_ids", "importance_sampling_ratio", "tool_mask", "pixel_values"}:
        assert torch.equal(again[name], batch[name]), name
    mask = batch["completion_mask"]
    assert torch.equal(again["completion_ids"], batch["completion_ids"] * mask)
    assert torch.equal(again["tool_mask"], batch["tool_mask"] * mask)
    # Padding is 1, whose logarithm TRL may add.
    assert torch.equal(again["importance_sampling_ratio"], torch.tensor([[2.0, 1, 1], [3, 3, 3], [1, 1, 1]]))
    part = batch_of([rows[2], rows[0]], shared, CPU)
    assert part["prompt_ids"].tolist() == [[0, 9, 10], [5, 6, 7]]
    assert part["completion_mask"].tolist() == [[0], [1]]


def test_no_row_holds_its_column() -> None:
    rows, _ = rows_of(_batch(advantages=torch.arange(3.0)))
    assert all(value.untyped_storage().nbytes() == value.nbytes for row in rows for value in row.values())


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"pixel_values": torch.zeros(2, 4)}, r"pixel_values, a tensor of \(2, 4\): only text"),
        ({"num_images": [1, 1, 1]}, "num_images, a list: only text"),
        ({"token_type_ids": torch.zeros(3, 6)}, "token_type_ids, a tensor of .* for each of its 3 tokens"),
        ({"prompt_mask": torch.tensor([[1, 1, 1], [0, 0, 0], [0, 1, 1]])}, "row 1 has an empty prompt"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_batches_are_refused(more: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        rows_of(_batch(**more))


def test_dealing() -> None:
    """Each row once, by length: the long one alone, and a masked one costs next to nothing."""
    lengths = [40, 3, 4, 5, 6, 7, 8]
    rows = [{"prompt_ids": torch.ones(2), "completion_ids": torch.full((n - 2,), i)} for i, n in enumerate(lengths)]
    masked = {"prompt_ids": torch.ones(60), "completion_ids": torch.ones(0)}
    cost = CostModel(quadratic=0, linear=1)
    assigned = [assign_rows([*rows, masked], rank=rank, ranks=2, token_cap=None, cost=cost) for rank in (0, 1)]
    found = [[len(row["completion_ids"]) + 2 for pack in each.packs for row in pack] for each in assigned]
    assert sorted(map(len, found)) == [1, 7]
    assert sorted(found[0] + found[1]) == sorted([*lengths, 2])
    assert [each.all_rows for each in assigned] == [8, 8]
    assert sum(each.tokens for each in assigned) == sum(lengths) - 2 * 7
    with pytest.raises(ValueError, match="over the token_cap of 10"):
        assign_rows(rows, rank=0, ranks=2, token_cap=10, cost=cost)


@pytest.mark.parametrize(
    ("prompt", "completion", "token_cap", "share", "want"),
    [
        (64, 16, None, 8, [4, 1]),  # a whole group has 64 + 16 + 3 * 17 tokens
        (64, 16, None, 0, [1] * 5),
        (64, 16, None, 1, [1] * 5),  # TRL would compute one row at a time
        (31, 16, None, 8, [1] * 5),  # nothing is shared
        (64, 512, None, 8, [1] * 5),  # 8% are gained, too little for packs of four times as many tokens
        (64, 16, 98, 8, [3, 2]),
    ],
)
def test_packs_of_a_group(prompt: int, completion: int, token_cap: int | None, share: int, want: list[int]) -> None:
    rows = [
        {"prompt_ids": torch.arange(prompt), "completion_ids": torch.full((completion,), 1000 + i)} for i in range(4)
    ]
    rows.append({"prompt_ids": torch.arange(prompt), "completion_ids": torch.ones(0, dtype=torch.int64)})  # masked
    how = {"token_cap": token_cap, "cost": CostModel(quadratic=0, linear=1), "share": share}
    assigned = assign_rows(rows, rank=0, ranks=1, **how)
    assert sorted(map(len, assigned.packs), reverse=True) == want
    assert assigned.tokens == 4 * completion
    if share:
        with pytest.raises(ValueError, match="over the token_cap of 10"):
            assign_rows(rows, rank=0, ranks=1, **how | {"token_cap": 10})


def test_metrics_merge_as_if_there_were_one_pack() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(6, generator=generator)
    ranks = []
    for packs in ([values[:1], values[1:4]], [values[4:]], []):  # the last rank has none
        alone = Alone(Accelerator(cpu=True))
        metrics = PackMetrics(alone, {})
        for pack in packs:
            total = alone.reduce(torch.stack([pack.sum(), torch.tensor(float(len(pack)))]), reduction="sum")
            metrics["mean"].append((total[0] / total[1]).item())
            metrics["low_min"].append(alone.gather(pack).min().item())
            metrics["low_min"].append(math.nan)
            metrics["high_max"].append(alone.gather(pack).max().item())
            metrics["own"].append(2.0)
            metrics["own"].append(math.nan)
            metrics["none_max"].append(math.nan)
        ranks.append(metrics.report())
    found = merged(ranks)
    assert math.isnan(found.pop("none_max"))
    want = {"mean": values.mean(), "low_min": values.min(), "high_max": values.max(), "own": 2.0}
    assert found == pytest.approx({name: float(value) for name, value in want.items()}, rel=1e-6)
    assert merged([ranks[2]]) == {}
