"""A sample's own position_ids: the loss and gradients of transformers, in a pack beside another sample."""

from __future__ import annotations

import copy

import pytest
import torch

from odc_triton.balance import pack_collate
from odc_triton.hf import enable_packing, summed_loss
from tests.support.families import causal_lm

IDS = [7, 3, 9, 5, 8, 2, 6, 4]
POSITIONS = {
    "two documents": ([0, 1, 2, 3, 4, 0, 1, 2], [-100, 3, 9, 5, 8, -100, 6, 4]),
    "the first token of the second is learned": ([0, 1, 2, 3, 4, 0, 1, 2], IDS),
    "an offset": ([*range(5, 13)], IDS),
    "each far from the last": ([0, 7, 14, 21, 28, 35, 42, 49], IDS),
}


@pytest.mark.parametrize("name", POSITIONS)
def test_position_ids_of_a_sample(name: str) -> None:
    positions, labels = POSITIONS[name]
    plain = causal_lm("Llama", attention="sdpa", spread=0.1).eval()
    ours = copy.deepcopy(plain)
    enable_packing(ours)
    other = {"input_ids": [5, 2, 9], "labels": [-100] * 3}
    (pack,) = pack_collate([[other, {"input_ids": IDS, "labels": labels, "position_ids": positions}, other]])
    summed_loss(ours, pack).backward()
    row = {"input_ids": [IDS], "position_ids": [positions], "labels": [labels]}
    loss = plain(**{key: torch.tensor(value) for key, value in row.items()}, use_cache=False).loss
    (loss * sum(each != -100 for each in labels[1:])).backward()
    for (key, want), found in zip(plain.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(found.grad, want.grad, rtol=1e-4, atol=1e-5, msg=key)
