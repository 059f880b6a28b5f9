"""TowerCost: the cost of a sample's images in a model's vision tower, by the numbers of their pixel values. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .sizes import size_of


@dataclass(frozen=True, kw_only=True)
class TowerCost:
    """Cost of n patches that attend to each other = quadratic n² + windowed n min(n, window) + linear n, in the units
    of `CostModel`.

    quadratic: of blocks that attend to all patches.
    linear: of all work per patch.
    values: pixel values of a patch.
    windowed: of blocks that attend within windows of `window` patches.
    """

    quadratic: float
    linear: float
    values: int
    windowed: float = 0.0
    window: int = 0

    def sample(self, values: Sequence[int]) -> float:
        """Cost of the images of a sample; 0 for no images.

        values: pixel values of each, as `values_of` gives them.
        """
        patches = [each / self.values for each in values]
        return math.fsum((self.quadratic * n + self.windowed * min(n, self.window) + self.linear) * n for n in patches)

    @classmethod
    def from_config(cls, config: object, *, trained: bool = True) -> TowerCost:
        """FLOPs of the tower and of what joins it to the text, from a transformers config with a `vision_config`:
        Qwen2-VL, Qwen2.5-VL, Qwen3-VL, SigLIP in Gemma3, Idefics3 and SmolVLM, CLIP in LLaVA.

        With L blocks of width h, and W weights that a patch is multiplied with:

            forward, per patch    2 W
            forward, attention    L * 2 * 2 h n²   (scores, weighted sum; whole, as not causal)
            backward              twice the forward; none if not `trained`, as of a frozen tower

        Left out: norms, position embeddings, a class token, windows at borders that are not full, a pooling head.
        Raises ValueError for a config without `vision_config`, and naming an attribute that is missing or not positive.
        """
        tower, text = getattr(config, "vision_config", None), getattr(config, "text_config", None)
        if tower is None or text is None:
            raise ValueError(
                f"{type(config).__name__} has no vision_config and text_config: give that of a whole model"
            )
        hidden = size_of(tower, "embed_dim", "hidden_size")
        blocks, patch = size_of(tower, "depth", "num_hidden_layers"), size_of(tower, "patch_size")
        full = getattr(tower, "fullatt_block_indexes", None)  # Qwen2.5-VL's, whose MLPs are gated
        ratio = getattr(tower, "mlp_ratio", None)
        inner = hidden * ratio if ratio else size_of(tower, "intermediate_size")
        values = size_of(tower, "in_channels", "num_channels") * getattr(tower, "temporal_patch_size", 1) * patch**2
        weights = blocks * (4 * hidden**2 + (2 if full is None else 3) * hidden * inner) + hidden * values
        windowed, window = 0, 0
        if full is not None:
            merge = size_of(tower, "spatial_merge_size")
            windowed, window = blocks - len(full), (size_of(tower, "window_size") // merge // patch * merge) ** 2
        each = 3 if trained else 1
        return cls(
            quadratic=each * 4 * hidden * (blocks - windowed),
            windowed=each * 4 * hidden * windowed,
            window=window,
            linear=each * 2 * (weights + _projector(config, tower, text, hidden, patch)),
            values=values,
        )


def _projector(config: object, tower: object, text: object, hidden: int, patch: int) -> float:
    """Its weights that a patch is multiplied with."""
    width = size_of(text, "hidden_size")
    if hasattr(tower, "spatial_merge_size"):  # Qwen's mergers: of merge² patches, joined, to their width and the text's
        mergers = 1 + len(getattr(tower, "deepstack_visual_indexes", ()))
        return mergers * hidden * (size_of(tower, "spatial_merge_size") ** 2 * hidden + width)
    if hasattr(config, "scale_factor"):  # Idefics3, SmolVLM: of scale² patches, joined, to the text's width
        return hidden * width
    if hasattr(config, "mm_tokens_per_image"):  # Gemma3: of patches that were averaged
        return hidden * width * size_of(config, "mm_tokens_per_image") * (patch / size_of(tower, "image_size")) ** 2
    return hidden * width + width**2  # LLaVA
