"""Samples with images: a mixture that was fixed in a file before anything was measured, and a model for it. The
file says how they were drawn.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from odc_triton.balance import CostModel
from odc_triton.plan.fields import IGNORED
from odc_triton.plan.tower import TowerCost

from .harness import Work
from .provenance import ROOT

FILE = ROOT / "bench" / "data" / "images.json"
MINIBATCHES, SAMPLES = 24, 16  # a minibatch's samples, of all ranks

# How packs are made of samples, after the name of a strategy.
BY_TEXT = ", by tokens alone"  # else the tower counts too
DUMMIES = ", dummies"  # a pack without images gets the smallest one
AT_ENDS = ", dummies at the ends"  # of a rank's packs only the first and last: it does not communicate in between
BEFORE = 8  # tokens of text that come before the images

PATCH_VALUES = 3 * 2 * 4**2
IMAGE, VIDEO, START, END = 1023, 1022, 1021, 1020
# As in Qwen2.5-VL 3B the tower is about half of the cost of an image's token, and the embedding 6% of all weights.
_TOWER = {"depth": 4, "hidden_size": 128, "intermediate_size": 344, "num_heads": 4, "out_hidden_size": 256}
_TOWER |= {"patch_size": 4, "window_size": 32, "fullatt_block_indexes": [3]}
_TEXT: dict[str, Any] = {"vocab_size": 1024, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4}
_TEXT |= {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": None}
_TEXT |= {"rope_parameters": {"rope_type": "default", "mrope_section": [8, 12, 12], "rope_theta": 10000.0}}
_TOKENS = {"image_token_id": IMAGE, "video_token_id": VIDEO}
_TOKENS |= {"vision_start_token_id": START, "vision_end_token_id": END}
CONFIG = {"text_config": _TEXT, "vision_config": _TOWER, "tie_word_embeddings": True, **_TOKENS}

Size = tuple[int, tuple[str, ...]]  # of a sample: tokens of text, and its images
DUMMY: Size = (1, ("2x2",))  # the smallest image, and no token that another predicts


def read(path: Path = FILE) -> list[list[Size]]:
    found = json.loads(path.read_text(encoding="utf-8"))["minibatches"]
    return [[(text, tuple(images)) for text, images in minibatch] for minibatch in found]


@dataclass(frozen=True)
class Mixture:
    """Random samples of `sizes`: `BEFORE` tokens, the images, the other tokens. All text is learned."""

    sizes: Sequence[Size]

    @cached_property
    def lengths(self) -> list[int]:
        return [text + sum(2 + h * w // 4 for h, w in map(_sides, own)) for text, own in self.sizes]

    def values(self, index: int) -> list[int]:
        """As `values_of` its sample, without making it."""
        return [h * w * PATCH_VALUES for h, w in map(_sides, self.sizes[index][1])]

    def __getitem__(self, index: int) -> dict[str, Any]:
        (text, own), generator = self.sizes[index], torch.Generator().manual_seed(index)
        ids = torch.randint(END, (text,), generator=generator).tolist()
        if not own:
            return {"input_ids": ids, "labels": ids}
        sides, head, tail = [*map(_sides, own)], ids[:BEFORE], ids[BEFORE:]
        inserted = [i for h, w in sides for i in (START, *[IMAGE] * (h * w // 4), END)]
        return {
            "input_ids": head + inserted + tail,
            "labels": head + [IGNORED] * len(inserted) + tail,
            "mm_token_type_ids": [0] * len(head) + [int(i == IMAGE) for i in inserted] + [0] * len(tail),
            "image_grid_thw": torch.tensor([(1, *each) for each in sides]),
            "pixel_values": torch.randn(sum(h * w for h, w in sides), PATCH_VALUES, generator=generator),
        }


def _sides(image: str) -> tuple[int, ...]:
    return tuple(map(int, image.split("x")))


@dataclass(frozen=True, kw_only=True)
class ImageWork(Work):
    """The mixture, by a Qwen2.5-VL model of `config`. `even`: all ranks train the samples of one."""

    even: bool = False

    def data(self) -> Mixture:
        return Mixture([sample for minibatch in read(Path(self.dataset)) for sample in minibatch] + [DUMMY])

    def whole_config(self) -> Any:
        from transformers import Qwen2_5_VLConfig

        return Qwen2_5_VLConfig(**self.config)

    def build(self) -> nn.Module:
        from transformers import Qwen2_5_VLForConditionalGeneration

        torch.manual_seed(self.seed)
        return Qwen2_5_VLForConditionalGeneration(self.whole_config())

    def cost(self) -> CostModel:
        return CostModel.from_config(self.whole_config().text_config)

    def tower(self) -> TowerCost:
        return TowerCost.from_config(self.whole_config())

    def assign(self, lengths: list[int], samples: list[int], *, balance: str, **how: Any) -> list[list[list[int]]]:
        if self.even:
            own, how["ranks"] = len(samples) // (ranks := how["ranks"]), 1
            return replace(self, even=False).assign(lengths[:own], samples[:own], balance=balance, **how) * ranks
        strategy, comma, words = balance.partition(",")
        data, tower, way = self.data(), self.tower(), comma + words
        extra = None if way == BY_TEXT else [tower.sample(data.values(index)) for index in samples]
        assigned = super().assign(lengths, samples, balance=strategy, extra=extra, **how)
        for own in assigned:
            for pack in {DUMMIES: own, AT_ENDS: [own[0], own[-1]]}.get(way, ()):
                if not any(data.sizes[index][1] for index in pack):
                    pack.append(len(data.sizes) - 1)
        return assigned
