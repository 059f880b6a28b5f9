"""A microbatch raises in the vision tower, where others may never come; a tower without pictures."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from odc_triton import MinibatchFailed, full_parameters, fully_shard, minibatch
from odc_triton.balance import pack_collate
from odc_triton.hf import enable_packing
from odc_triton.hf.images import TOWER
from odc_triton.hf.loss import model_inputs
from tests.support import ranks
from tests.support.deadlines import LONG_S
from tests.support.splitting import gradients
from tests.support.vision import FAMILIES, alone


def sharded(family: str) -> nn.Module:
    model = FAMILIES[family].model(dtype=torch.float64)
    enable_packing(model)
    return fully_shard(model.train(), timeout=LONG_S)


def is_tower(name: str) -> bool:
    return re.fullmatch(TOWER, name) is not None


def step(model: nn.Module, packs: Sequence[Sequence[dict[str, Any]]]) -> None:
    with minibatch(model, tokens=1):
        for pack in pack_collate(packs):
            logits = model(**model_inputs(pack, model)).logits[0]
            F.cross_entropy(logits[:-1], pack["labels"][0, 1:], reduction="sum").backward()


def _raises(rank: int, world: int, family: str) -> dict[str, Any]:
    model, made = sharded(family), FAMILIES[family]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    bad = made.sample(9, 1, seed=1)
    bad["pixel_values"] = bad["pixel_values"][..., :-1]
    with pytest.raises(MinibatchFailed) as caught:
        step(model, [[made.sample(9, 1, seed=0)], *([[bad]] if rank == 1 else [])])
    assert all(parameter.grad is None for parameter in model.parameters())
    step(model, [[made.sample(9, 2, seed=2)]] if rank == 1 else [])  # rank 0 without a microbatch
    found = {"error": str(caught.value), "mixed": gradients(model)}
    optimizer.zero_grad()
    before = {name: value.clone() for name, value in full_parameters(model)}
    step(model, [[made.sample(9, 0, seed=rank)]])
    found["text"] = gradients(model)
    optimizer.step()
    found["moved"] = {name for name, value in full_parameters(model) if not torch.equal(value, before[name])}
    return found


@pytest.mark.parametrize("family", ["qwen2_5_vl"])
def test_raises_in_the_tower_and_goes_on(family: str) -> None:
    """Then with one rank's pictures alone; and without any, where the tower has no gradients and is not moved, not even
    by weight decay.
    """
    wanted = {}
    for name, samples in (
        ("mixed", [FAMILIES[family].sample(9, 2, seed=2)]),
        ("text", [FAMILIES[family].sample(9, 0, seed=rank) for rank in range(2)]),
    ):
        model = FAMILIES[family].model(dtype=torch.float64).train()
        for each in samples:
            labels = torch.tensor(each["labels"])[1:]
            F.cross_entropy(alone(model, each)[:-1], labels, reduction="sum").backward()
        wanted[name] = gradients(model)
    assert any(map(is_tower, wanted["mixed"]))
    assert not any(map(is_tower, wanted["text"]))
    for found in ranks.run(_raises, 2, family):
        assert "rank 1: " in found["error"]
        assert "rank 0: " not in found["error"]
        for name in ("mixed", "text"):
            assert found[name].keys() == wanted[name].keys()
            for key, each in wanted[name].items():
                assert torch.allclose(found[name][key], each, rtol=0, atol=1e-10), key
        assert found["moved"] == wanted["text"].keys()
