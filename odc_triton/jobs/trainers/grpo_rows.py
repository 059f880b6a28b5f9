"""A GRPO minibatch as rows, one a completion, that are assigned to ranks and packs; and back as TRL's padded batch.

TRL prepares a batch of tensors padded to its longest row: `prompt_ids` and `prompt_mask` [B, P], padded on the left;
`completion_ids` and `completion_mask` [B, C], padded on the right; and the loss's inputs per completion or token.
A masked completion (`mask_truncated_completions`) has no token here, and stays a row that the normalisers count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ...plan.cost import CostModel
from ...plan.entries import number_of
from ...plan.fields import IGNORED
from ...plan.plan import Plan
from ...plan.planner import make_plan
from ...plan.relatives import find_relatives
from ...plan.samples import Limits, Samples

# Values of padding, 0 for all others. TRL sums the logarithms of this one over padding too.
_PADDING = {"importance_sampling_ratio": 1.0}
_LEAST_GAIN = 0.2  # of the estimated time, for which packs may have more tokens than the longest row

Row = dict[str, Tensor]
"""`prompt_ids` [p] and `completion_ids` [c], without padding; others [c], or a scalar for the whole completion."""


def rows_of(batch: Mapping[str, Any]) -> tuple[list[Row], dict[str, Tensor]]:
    """The rows of TRL's batch, and the 0-dimensional tensors, which belong to the whole batch.

    [B, 1], a ratio of a whole completion, is repeated for each of its tokens: the loss is the same.

    Raises ValueError for an entry that is not a tensor of rows, such as images, and for a row without a prompt.
    """
    prompt_masks, masks = (batch[name].bool().cpu() for name in ("prompt_mask", "completion_mask"))
    shared: dict[str, Tensor] = {}
    rows: list[Row] = [{} for _ in masks]
    for name, value in batch.items():
        if name in ("prompt_mask", "completion_mask") or value is None:
            continue
        if isinstance(value, Tensor) and value.ndim == 0:
            shared[name] = value
            continue
        width = masks.shape[1] if name != "prompt_ids" else prompt_masks.shape[1]
        if not isinstance(value, Tensor) or len(value) != len(rows) or list(value.shape[1:]) not in ([], [1], [width]):
            raise ValueError(
                f"the batch has {name}, a {_described(value)}: only text is supported; give {len(rows)} rows with one "
                f"number for a completion, or one for each of its {masks.shape[1]} tokens"
            )
        value = value.detach().cpu()
        for row, taken, mask, prompt_mask in zip(rows, value, masks, prompt_masks, strict=True):
            if name == "prompt_ids":
                row[name] = taken[prompt_mask]
            else:
                row[name] = taken.expand(len(mask))[mask] if taken.ndim else taken.clone()  # not its column's storage
    for index, row in enumerate(rows):
        if not len(row["prompt_ids"]):
            raise ValueError(f"row {index} has an empty prompt: nothing predicts its completion's first token")
    return rows, shared


def batch_of(rows: Sequence[Row], shared: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """TRL's padded batch of these rows, on `device`; the inverse of `rows_of`."""
    batch, parts = dict(shared), ("prompt", "completion")
    rows = [row | {f"{part}_mask": torch.ones_like(row[f"{part}_ids"]) for part in parts} for row in rows]
    for name, first in rows[0].items():
        values, side = [row[name] for row in rows], "left" if name in ("prompt_ids", "prompt_mask") else "right"
        pad = partial(pad_sequence, batch_first=True, padding_value=_PADDING.get(name, 0), padding_side=side)
        batch[name] = pad(values) if first.ndim else torch.stack(values)
    return {name: value.to(device) for name, value in batch.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class AssignedRows:
    """This rank's packs of a minibatch, and of all ranks the number of rows and `in_bonus`."""

    packs: list[list[Row]]
    all_rows: int
    all_in_bonus: int

    @property
    def tokens(self) -> int:
        """The tokens of this rank's rows that the loss counts."""
        return sum(map(counted, self.packs))


def assign_rows(
    rows: Sequence[Row], *, rank: int, ranks: int, token_cap: int | None, cost: CostModel, share: int = 0
) -> AssignedRows:
    """Assigns all ranks' `rows`, in the same order on each, by LB-Mini: a rank may get any number of rows and packs.

    `token_cap`: the most tokens of a pack, by default those of the longest row. `share`: if not 0, a pack computes
    prompts that its rows share once, and they are assigned by `share_prefixes`. Raises ValueError for a longer row.
    """
    if share:
        plan = share_prefixes([*map(_sample, rows)], ranks=ranks, token_cap=token_cap, cost=cost, most_rows=share)
    else:
        lengths = [*map(row_tokens, rows)]
        limits = Limits(ranks=ranks, token_cap=max(lengths) if token_cap is None else token_cap)
        plan = make_plan(Samples.of(limits.checked(lengths), cost), limits)
    own = [[rows[number_of(each)] for each in pack] for pack in plan.packs(rank)]
    return AssignedRows(packs=own, all_rows=len(rows), all_in_bonus=in_bonus(rows))


def share_prefixes(
    samples: Sequence[Mapping[str, Any]], *, ranks: int, token_cap: int | None, cost: CostModel, most_rows: int
) -> Plan:
    """A plan in whose packs samples share prefixes. `samples`: as `find_relatives` takes them.

    `token_cap`: by default the longest sample's tokens. They leave no room to share, so if that saves a fifth of the
    estimate a pack may hold all samples of a prompt, but no more tokens than `most_rows` rows of TRL's padded batch.
    """
    lengths, relatives = [len(each["input_ids"]) for each in samples], find_relatives(samples)
    longest = max(lengths)

    def planned(token_cap: int) -> Plan:
        limits = Limits(ranks=ranks, token_cap=token_cap)
        return make_plan(Samples.of(limits.checked(lengths), cost, prefixes=relatives), limits)

    found = planned(token_cap or longest)
    if token_cap is None:
        most = max(sum(strip.stop - strip.start for strip in family) for family in relatives.families())
        larger = planned(max(longest, min(most, most_rows * longest)))
        if larger.estimate < (1 - _LEAST_GAIN) * found.estimate:
            found = larger
    return found


def _sample(row: Row) -> dict[str, Tensor]:
    """A row's tokens, as many as `row_tokens`, and those that are predicted."""
    ids = torch.cat([row["prompt_ids"], row["completion_ids"]])[: row_tokens(row)]
    labels = ids.clone()
    labels[: len(row["prompt_ids"])] = IGNORED
    return {"input_ids": ids, "labels": labels}


def row_tokens(row: Row) -> int:
    """The model's input tokens of a row; 1 for a row without a completion, which needs no forward."""
    return len(row["prompt_ids"]) + len(row["completion_ids"]) if len(row["completion_ids"]) else 1


def counted(rows: Sequence[Row]) -> int:
    """Tokens that the loss counts: completions without the output of tools and environments."""
    return sum(int(row["tool_mask"].sum()) if "tool_mask" in row else len(row["completion_ids"]) for row in rows)


def in_bonus(rows: Sequence[Row]) -> int:
    """Tokens of the entropy bonus: those that the loss counts, or of these the ones with high entropies."""
    return sum(int(row["entropy_mask"].sum()) if "entropy_mask" in row else counted([row]) for row in rows)


def _described(value: Any) -> str:
    return f"tensor of {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
