"""Samples with images in segments over ranks, and samples that share images: as one process trains them whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from odc_triton import enable_split, fully_shard, minibatch
from odc_triton.balance import PackedDataset, count_target_tokens, pack_collate
from odc_triton.hf import enable_packing
from odc_triton.packs.loss import model_inputs
from odc_triton.plan.entries import Entry, Segment
from odc_triton.plan.plan import Plan
from tests.support import ranks
from tests.support.hybrids import rules_in
from tests.support.splitting import gradients
from tests.support.table_models import with_images
from tests.support.versions import is_older
from tests.support.vision import FAMILIES, alone

SAMPLES = [(30, 2), (25, 2), (12, 1), (20, 0)]  # (tokens of text, images)


def samples(family: str) -> list[dict[str, Any]]:
    """The second begins as the first, with the same images."""
    made = FAMILIES[family].samples(SAMPLES)
    floor = floor_of(made[0])
    made[1] = dict(made[0])
    for name in ("input_ids", "labels"):
        kept = made[0][name][: floor + 4]
        made[1][name] = kept + [(each + 1) % 50 for each in made[0]["input_ids"][floor + 4 : -5]]
    made[1]["mm_token_type_ids"] = made[0]["mm_token_type_ids"][:-5]
    for each in made[:2]:
        each["labels"] = [-100] * (floor + 4) + each["labels"][floor + 4 :]  # what is shared is not learned
    return made


def floor_of(sample: dict[str, Any]) -> int:
    return len(sample["mm_token_type_ids"]) - sample["mm_token_type_ids"][::-1].index(1)


def deals(family: str) -> dict[str, list[list[list[Entry]]]]:
    made = samples(family)
    floor, ends = floor_of(made[0]), [len(each["input_ids"]) for each in made]
    branch = Segment(1, floor + 3, ends[1], parent=0)
    return {
        "cut": [[[Segment(0, 0, floor), 3], [1]], [[2, Segment(0, floor, ends[0])]]],
        "cut later": [[[2, Segment(0, 0, floor + 9)]], [[Segment(0, floor + 9, ends[0])], [1, 3]]],
        "shared in a pack": [[[2, Segment(0, 0, ends[0]), branch]], [[3]]],
        "shared over ranks": [[[2, Segment(0, 0, floor + 5)]], [[Segment(0, floor + 5, ends[0]), branch, 3]]],
    }


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="sum")


def _train(rank: int, world: int, family: str, deal: str, backend: str) -> dict[str, Tensor]:
    model = FAMILIES[family].model(dtype=torch.float64)
    with rules_in(torch.float64):
        return _trained(model, rank, family, deal, backend)


def _trained(model: nn.Module, rank: int, family: str, deal: str, backend: str) -> dict[str, Tensor]:
    enable_packing(model)
    model = fully_shard(model.train(), backend=backend)
    enable_split(model, tokens=64)
    dealt = deals(family)[deal]
    packs = Plan.by_hand(dealt).packs(rank)
    packs = pack_collate(PackedDataset(samples(family)).__getitems__(packs))
    with minibatch(model, tokens=count_target_tokens(packs), split=packs.split) as mb:
        for pack in packs:
            logits = model(**model_inputs(pack, model)).logits[0]
            labels = (
                pack["shift_labels"][0] if "shift_labels" in pack else F.pad(pack["labels"][0, 1:], (0, 1), value=-100)
            )
            (_loss(logits, labels) / mb.tokens).backward()
    return gradients(model)


def check(*cells: tuple[str, str, str]) -> None:
    """`cells`: (family, deal, backend), in one launch."""
    for (family, *_), of_ranks in zip(cells, ranks.run_all(2, *((_train, *cell) for cell in cells)), strict=True):
        model = FAMILIES[family].model(dtype=torch.float64).train()
        made = samples(family)
        targets = count_target_tokens(pack_collate([[each] for each in made]))
        with rules_in(torch.float64):
            for sample in made:
                (_loss(alone(model, sample)[:-1], torch.tensor(sample["labels"])[1:]) / targets).backward()
        wanted = gradients(model)
        scale = max(float(each.abs().max()) for each in wanted.values())
        for found in of_ranks:
            assert found.keys() == wanted.keys()
            off = {name: float((found[name] - each).abs().max()) / scale for name, each in wanted.items()}
            assert max(off.values()) <= 1e-10, sorted(off.items(), key=lambda item: -item[1])[:5]


def test_a_sample_is_cut_behind_its_images() -> None:
    families = [each for each in ("qwen2_5_vl", "gemma3") if not is_older(FAMILIES[each].since)]
    check(*((family, deal, "cpu") for family in families for deal in ("cut", "shared over ranks")))


@pytest.mark.slow
@pytest.mark.parametrize("family", [pytest.param(each, marks=with_images(each, ["splits"])) for each in FAMILIES])
def test_every_family_in_segments(family: str) -> None:
    check(*((family, deal, backend) for deal in deals(family) for backend in ("cpu", "cpu-sharded")))
