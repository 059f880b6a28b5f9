"""A sample's images in a pack: their pixel values, and the places and positions of their tokens."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypedDict

import torch
from torch import Tensor

from ..plan.fields import IMAGE_FIELDS, TOKEN_TYPES


class PackImages(TypedDict, total=False):
    """The fields of a pack's images, of T tokens. What the processor made is joined along dim 0."""

    pixel_values: Tensor
    image_grid_thw: Tensor  # int64 [images, 3]: patches in time, height and width
    pixel_attention_mask: Tensor  # [tiles, H, W]
    mm_token_type_ids: Tensor  # int64 [1, T]: 1 for an image's tokens, 0 for text
    image_blocks: tuple[tuple[int, int, int], ...]  # of each run of tokens: its document's first row, its own, its end
    mrope_position_ids: Tensor  # int64 [3, 1, T], if there are grids


_VIDEOS = ("pixel_values_videos", "video_grid_thw")


@dataclass(frozen=True, kw_only=True)
class SampleImages:
    """`fields`: what the processor made of them, along dim 0 one after the other. `runs`: the tokens that stand for
    them, as spans [start, stop) of neighbours. `tokens`: how many the sample has.
    """

    fields: dict[str, Tensor]
    runs: list[tuple[int, int]]
    tokens: int

    @classmethod
    def of(cls, sample: Mapping[str, Any], tokens: int, where: str) -> SampleImages | None:
        """The images of a sample of `tokens` tokens; None if it has none. Raises ValueError, which begins with
        `where`, for videos and for fields that don't fit one another.
        """
        if any(sample.get(name) is not None for name in _VIDEOS):
            raise ValueError(f"{where} has a video: only images are supported, leave it out")
        fields = {name: torch.as_tensor(sample[name]) for name in IMAGE_FIELDS if sample.get(name) is not None}
        types = next((torch.as_tensor(sample[name]) for name in TOKEN_TYPES if sample.get(name) is not None), None)
        if types is None or not bool(types.any()):
            if len(fields.get("pixel_values", ())):
                raise ValueError(
                    f"{where} has pixel_values and no mm_token_type_ids that say which tokens are the images': call "
                    f"the processor with return_mm_token_type_ids=True"
                )
            return None
        if types.shape != (tokens,):
            raise ValueError(f"{where}: {TOKEN_TYPES[0]} have shape {tuple(types.shape)}, for {tokens} input_ids")
        if "pixel_values" not in fields:
            raise ValueError(f"{where} has tokens of images and no pixel_values: leave neither out")
        if not bool(((types == 0) | (types == 1)).all()):
            raise ValueError(f"{where}: types of tokens must be 0, text, or 1, an image: leave videos out")
        if (mask := fields.get("pixel_attention_mask")) is not None and mask.dim() == 4:  # a batch of one
            fields |= {"pixel_attention_mask": mask[0], "pixel_values": fields["pixel_values"][0]}
        edges = types.new_tensor([0, *types.tolist(), 0]).diff().nonzero().flatten().tolist()
        found = cls(fields=fields, runs=[*zip(edges[::2], edges[1::2], strict=True)], tokens=tokens)
        if (grids := fields.get("image_grid_thw")) is not None and len(grids) != len(found.runs):
            raise ValueError(f"{where} has {len(grids)} rows of image_grid_thw and {len(found.runs)} runs of tokens")
        return found

    def are_within(self, start: int, stop: int, where: str) -> bool:
        """True if tokens `start` to `stop` have all images, False if they have none. Raises ValueError otherwise."""
        if start >= self.runs[-1][1]:
            return False
        if start > self.runs[0][0] or stop < self.runs[-1][1]:
            raise ValueError(
                f"{where} is cut within its images: the segment has tokens {start} to {stop}, the images' are "
                f"{self.runs[0][0]} to {self.runs[-1][1]}. Give MinibatchSampler the samples' `floors`"
            )
        return True

    def positions(self, where: str) -> Tensor | None:
        """[3, tokens], int64: time, height and width of each token; None for images without grids.

        Text goes up by one on all three axes. An image's tokens have their place in its grid, and the text after it
        goes on behind the longer side. As `get_rope_index` of transformers' modeling_qwen2_5_vl.py.
        """
        if (grids := self.fields.get("image_grid_thw")) is None:
            return None
        parts, position, end = [], 0, 0
        for (start, stop), (time, height, width) in zip(self.runs, grids.tolist(), strict=True):
            merged = math.isqrt(time * height * width // (stop - start)) or 1  # patches per token, along a side
            if (stop - start) * merged**2 != time * height * width or height % merged or width % merged:
                raise ValueError(
                    f"{where}: an image of {time} x {height} x {width} patches has {stop - start} tokens, {start} to "
                    f"{stop}, which is no grid: was the sample cut within it?"
                )
            parts.append(torch.arange(position, position + start - end).expand(3, -1))
            position += start - end
            axes = [torch.arange(time), torch.arange(height // merged), torch.arange(width // merged)]
            parts.append(torch.stack(torch.meshgrid(*axes, indexing="ij")).flatten(1) + position)
            position, end = position + max(height, width) // merged, stop
        parts.append(torch.arange(position, position + self.tokens - end).expand(3, -1))
        return torch.cat(parts, dim=1)


def join(
    parts: Sequence[tuple[SampleImages | None, int, int]], starts: Sequence[int], bounds: Sequence[int], where: str
) -> PackImages:
    """The fields of a pack's images, for its `parts`: of each its sample's images and tokens [start, stop).
    `starts`: their first rows in the pack, and its end; `bounds`: those of documents, of which a sample may be several.
    See `pack_collate`. Raises ValueError.
    """
    if all(images is None for images, _, _ in parts):
        return {}
    fields: dict[str, list[Tensor]] = {}
    blocks: list[tuple[int, int, int]] = []
    positions: list[Tensor | None] = []
    types = torch.zeros(starts[-1], dtype=torch.long)
    for place, ((images, start, stop), (first, _)) in enumerate(zip(parts, pairwise(starts), strict=True)):
        here = f"{where}, sample {place}"
        whole = None if images is None else images.positions(here)
        positions.append(None if whole is None else whole[:, start:stop])
        if images is None or not images.are_within(start, stop, here):
            continue
        for name, values in images.fields.items():
            if name in fields and values.shape[1:] != fields[name][0].shape[1:]:
                raise ValueError(
                    f"{here}: {name} of shape {list(values.shape)} in a pack with {list(fields[name][0].shape)}: "
                    f"images of one pack must have one size; let the processor resize them"
                )
            fields.setdefault(name, []).append(values)
        for begin, end in images.runs:
            begin, end = first + begin - start, first + end - start
            blocks.append((bounds[bisect_right(bounds, begin) - 1], begin, end))
            types[begin:end] = 1
    found: Any = {name: torch.cat(values) for name, values in fields.items()}
    if any(each is not None for each in positions):
        texts = (torch.arange(start, stop).expand(3, -1) for _, start, stop in parts)
        axes = [text if each is None else each for each, text in zip(positions, texts, strict=True)]
        found["mrope_position_ids"] = torch.cat(axes, dim=1)[:, None]
    if blocks:
        found |= {"mm_token_type_ids": types[None], "image_blocks": tuple(blocks)}
    return found
