"""Vision-language models: what each family's forward takes in addition to text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..plan.fields import IMAGE_FIELDS


@dataclass(frozen=True, kw_only=True)
class _Inputs:
    """`mrope`: positions in text, time, height and width. `blocks`: an image's tokens see one another. `batch`: its
    pixel values have a dimension more, of rows."""

    mrope: bool = False
    blocks: bool = False
    batch: bool = False


# Names of modules and parameters of a vision tower. Qwen-VL has its projector, the merger, in the tower.
TOWER = r"(.*\.)?(visual|vision_tower|vision_model)\.(?!.*merger).*"

# By the config's model_type; docs/models.md is made by tests of these.
_QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
_FAMILIES = {
    **dict.fromkeys(_QWEN, _Inputs(mrope=True)),
    "gemma3": _Inputs(blocks=True),
    **dict.fromkeys(("idefics3", "smolvlm"), _Inputs(batch=True)),
    "llava": _Inputs(),
}


def _inputs_of(model: Any) -> _Inputs | None:
    return _FAMILIES.get(getattr(getattr(model, "config", model), "model_type", ""))


def sees_images(model: Any) -> bool:
    """True for a model, or its config, of a family whose images packs may have."""
    return _inputs_of(model) is not None


def has_blocks(model: Any) -> bool:
    """True if an image's tokens see one another."""
    family = _inputs_of(model)
    return family is not None and family.blocks


def tower_of(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of the vision tower, without the projector; none for a model of text."""
    return [parameter for name, parameter in model.named_parameters() if re.fullmatch(TOWER, name)]


def trains_tower(model: nn.Module) -> bool:
    return any(each.requires_grad for each in tower_of(model))


def text_positions(model: nn.Module, positions: Tensor) -> Tensor:
    """Positions of text, [1, T], as the model's forward takes them in a pack."""
    family = _inputs_of(model)
    return positions if family is None or not family.mrope else positions.expand(4, *positions.shape)


def image_inputs(model: nn.Module, pack: Mapping[str, Any], *, packed: bool) -> dict[str, Any]:
    """The positions, and the inputs for the images, of a pack. `packed`: the model has our attention.

    Raises ValueError for images if its family is none of those that are supported.
    """
    family, positions = _inputs_of(model), pack.get("position_ids")
    inputs = {} if positions is None else {"position_ids": text_positions(model, positions)}
    if (axes := pack.get("mrope_position_ids")) is not None and family is not None and family.mrope:
        inputs["position_ids"] = torch.cat([pack["position_ids"][None], axes])
    if "pixel_values" not in pack:
        return inputs
    if family is None:
        raise ValueError(
            f"this pack has images, and {type(model).__name__} is of none of the families whose packs may have them: "
            f"{', '.join(_FAMILIES)}. Call the model yourself inside the minibatch, with its processor's inputs"
        )
    for name in IMAGE_FIELDS:
        if name in pack:
            inputs[name] = pack[name][None] if family.batch else pack[name]
    if family.blocks:
        inputs |= {"image_blocks": pack["image_blocks"]} if packed else {"token_type_ids": pack["mm_token_type_ids"]}
    return inputs
