"""Images in packs: their tokens' positions as transformers has them, and what does not fit."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from odc_triton.balance import PackedDataset, pack_collate
from odc_triton.plan.entries import Segment
from tests.support.vision import FAMILIES


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_positions_of_three_axes(family: str) -> None:
    samples = FAMILIES[family].samples([(9, 3), (5, 0), (7, 1)])
    (pack,) = pack_collate([samples])
    inner = FAMILIES[family].model().model
    wanted = []
    for sample in samples:
        ids = torch.tensor(sample["input_ids"])[None]
        types = torch.tensor(sample.get("mm_token_type_ids", [0] * ids.shape[1]))[None]
        wanted.append(inner.get_rope_index(ids, types, image_grid_thw=sample.get("image_grid_thw"))[0])
    assert torch.equal(pack["mrope_position_ids"], torch.cat(wanted, dim=2))


def test_fields_are_joined_and_blocks_are_runs_of_a_document() -> None:
    samples = FAMILIES["gemma3"].samples([(5, 2), (4, 0), (3, 1)])
    (pack,) = pack_collate([samples])
    assert pack["pixel_values"].shape == (3, 3, 16, 16)
    assert pack["image_blocks"] == ((0, 5, 9), (0, 11, 15), (21, 26, 30))
    assert pack["mm_token_type_ids"].sum() == 12
    assert "mrope_position_ids" not in pack
    several = samples[0] | {"position_ids": [0, 1, 2, *range(len(samples[0]["input_ids"]) - 3)]}  # of two documents
    assert pack_collate([[several]])[0]["image_blocks"] == ((3, 5, 9), (3, 11, 15))
    batched = FAMILIES["idefics3"].sample(5, 2, seed=0)
    once = pack_collate([[batched]])[0]
    batched |= {name: batched[name][None] for name in ("pixel_values", "pixel_attention_mask")}
    (again,) = pack_collate([[batched]])
    assert all(torch.equal(once[name], again[name]) for name in ("pixel_values", "pixel_attention_mask"))


QWEN = FAMILIES["qwen2_5_vl"].sample(9, 2, seed=0)
GEMMA = FAMILIES["gemma3"].sample(9, 2, seed=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mm_token_type_ids": None}, "pack 0, sample 1 has pixel_values and no mm_token_type_ids"),
        ({"pixel_values": None}, "tokens of images and no pixel_values"),
        ({"mm_token_type_ids": QWEN["mm_token_type_ids"][1:]}, "have shape"),
        ({"mm_token_type_ids": [2 * each for each in QWEN["mm_token_type_ids"]]}, "leave videos out"),
        ({"pixel_values_videos": [1.0]}, "has a video: only images"),
        ({"image_grid_thw": QWEN["image_grid_thw"][:1]}, "1 rows of image_grid_thw and 2 runs"),
        ({"image_grid_thw": QWEN["image_grid_thw"] + 1}, "which is no grid"),
    ],
)
def test_fields_that_do_not_fit(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        pack_collate([[FAMILIES["qwen2_5_vl"].sample(5, 0, seed=1), QWEN | change]])


def test_sizes_that_do_not_fit() -> None:
    other = GEMMA | {"pixel_values": torch.zeros(2, 3, 20, 20)}
    with pytest.raises(ValueError, match=re.escape("pack 0, sample 1: pixel_values of shape [2, 3, 20, 20]")):
        pack_collate([[GEMMA, other]])


def test_a_segment_has_all_images_or_none() -> None:
    data = PackedDataset([GEMMA])
    floor = 15
    first, rest = pack_collate(
        data.__getitems__([[Segment(0, 0, floor)], [Segment(0, floor, len(GEMMA["input_ids"]))]])
    )
    assert len(first["pixel_values"]) == 2
    assert not {"pixel_values", "image_blocks"} & rest.keys()
    with pytest.raises(ValueError, match=r"is cut within its images: .* the images' are 5 to 15"):
        pack_collate(data.__getitems__([[Segment(0, 0, floor - 1)]]))
