"""Small models of families that see images, and samples for them, as their processors would make them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.families import SIZES
from tests.support.versions import is_older

VOCABULARY = 64
IMAGE = 60  # the token that stands for a part of an image
_PATCH = 4  # pixels
_SIDE = 16  # pixels of an image of fixed size

_TEXT = SIZES | {"vocab_size": VOCABULARY, "max_position_embeddings": 512}
_TEXT |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
TOKENS = {"image_token_id": IMAGE, "video_token_id": 61, "vision_start_token_id": 58, "vision_end_token_id": 59}
_ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}


_QWEN_TOWER = {"depth": 2, "hidden_size": 32, "num_heads": 2, "patch_size": _PATCH}
_OUT = {"intermediate_size": 48, "out_hidden_size": 32}
_QWEN2_5_TOWER = _OUT | {"window_size": 4 * _PATCH, "fullatt_block_indexes": [1]}
_QWEN3_TOWER = _OUT | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_SIGLIP = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
_SIGLIP |= {"image_size": _SIDE, "patch_size": _PATCH}


def _made(name: str, text: dict[str, Any], tower: dict[str, Any], **config: Any) -> nn.Module:
    import transformers

    made = getattr(transformers, f"{name}Config")(text_config=_TEXT | text, vision_config=tower, **config)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(made)
    if "Moe" in name:
        model.set_experts_implementation("eager")  # others take no fp64
    return model


def _qwen(name: str, tower: dict[str, Any], **text: Any) -> Callable[[], nn.Module]:
    rope = _ROPE | ({"mrope_interleaved": True} if "Qwen3" in name else {})
    return partial(_made, name, {"rope_parameters": rope} | text, _QWEN_TOWER | tower, **TOKENS)


def _hybrid() -> nn.Module:
    """In fp64 its tests are within `rules_in`."""
    from tests.support.hybrids import hybrid

    return hybrid("qwen3_5, images", dtype=torch.float32)


def _idefics(name: str) -> Callable[[], nn.Module]:
    return partial(_made, name, {"model_type": "llama"}, _SIGLIP, image_token_id=IMAGE, scale_factor=2, pad_token_id=0)


def _grids(images: int, generator: torch.Generator) -> dict[str, Any]:
    """As Qwen2-VL's processor: patches of images of different sizes, merged by 2 x 2."""
    sides = 2 * torch.randint(1, 4, (images, 2), generator=generator)
    grid = torch.cat([torch.ones(images, 1, dtype=torch.long), sides], dim=1)
    values = torch.randn(int(grid.prod(1).sum()), 3 * 2 * _PATCH**2, generator=generator)
    return {"pixel_values": values, "image_grid_thw": grid, "tokens": (grid.prod(1) // 4).tolist()}


def _fixed(tokens: int, *, masks: bool = False) -> Callable[[int, torch.Generator], dict[str, Any]]:
    def make(images: int, generator: torch.Generator) -> dict[str, Any]:
        values = torch.randn(images, 3, _SIDE, _SIDE, generator=generator)
        mask = {"pixel_attention_mask": torch.ones(images, _SIDE, _SIDE, dtype=torch.long)} if masks else {}
        return {"pixel_values": values, "tokens": [tokens] * images, **mask}

    return make


def _norm(module: nn.Module, x: Tensor) -> Tensor:
    """Of transformers, but in the dtype of `x`: in fp32 a pack's sums would round otherwise than its documents'."""
    if type(module).__name__ == "Gemma3RMSNorm":
        return module._norm(x) * (1 + module.weight)
    return module.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + module.variance_epsilon)


@dataclass(frozen=True)
class Family:
    """`title`, `kind`: in docs/models.md. `make`: a random model. `images`: the fields of so many images, and
    `tokens`, of each those in the text; `since`: the first transformers in whose packs it trains.
    """

    title: str
    make: Callable[[], nn.Module]
    images: Callable[[int, torch.Generator], dict[str, Any]]
    kind: str = "dense, images"
    since: str = "0"

    def model(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
        """The test is skipped where this transformers is too old."""
        if is_older(self.since):
            pytest.skip(f"{self.title} needs transformers {self.since}")
        torch.manual_seed(seed)
        model = self.make().to(dtype)
        with torch.no_grad():
            for each in model.parameters():
                each += 0.1 * torch.randn_like(each) * (each == 0).all()  # a projector may begin with zeros
        if dtype is torch.float64:
            for each in model.modules():
                if type(each).__name__.endswith("RMSNorm") and not type(each).__name__.startswith("Qwen3_5"):
                    each.forward = partial(_norm, each)
        return model

    def sample(self, text: int, images: int, seed: int, *, at: int = 3) -> dict[str, Any]:
        """`text` tokens of text, the images after the first `at` of them, two tokens apart; the text after them is
        learned.
        """
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(VOCABULARY - 8, (text,), generator=generator).tolist()
        if not images:
            return {"input_ids": ids, "labels": [-100] * at + ids[at:]}
        fields = self.images(images, generator)
        tokens, head = fields.pop("tokens"), ids[:at]
        for number, count in enumerate(tokens):
            head += [58 - number % 2] * 2 + [IMAGE] * count
        learned = ids[at:]
        types = [int(each == IMAGE) for each in head] + [0] * len(learned)
        labels = [-100] * len(head) + learned
        return {"input_ids": head + learned, "labels": labels, "mm_token_type_ids": types, **fields}

    def samples(self, sizes: Sequence[tuple[int, int]], seed: int = 0) -> list[dict[str, Any]]:
        """By sample, (tokens of text, images)."""
        return [self.sample(text, count, seed * 100 + at) for at, (text, count) in enumerate(sizes)]


_GEMMA3 = {"head_dim": 8, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
_LLAVA = {"image_token_index": IMAGE, "vision_feature_layer": -1, "image_seq_length": 16}
_CLIP = {"model_type": "clip_vision_model", "projection_dim": 32}
FAMILIES = {
    "qwen2_vl": Family("Qwen2-VL", _qwen("Qwen2VL", {"embed_dim": 32, "mlp_ratio": 2}), _grids),
    "qwen2_5_vl": Family("Qwen2.5-VL", _qwen("Qwen2_5_VL", _QWEN2_5_TOWER), _grids),
    "qwen3_vl": Family("Qwen3-VL", _qwen("Qwen3VL", _QWEN3_TOWER, head_dim=8), _grids),
    "qwen3_vl_moe": Family(
        "Qwen3-VL-MoE", _qwen("Qwen3VLMoe", _QWEN3_TOWER, head_dim=8, **_EXPERTS), _grids, kind="mixture, images"
    ),
    "qwen3_5": Family("Qwen3.5", _hybrid, _grids, kind="dense, gated delta rule, images"),
    "gemma3": Family(
        "Gemma3",
        partial(_made, "Gemma3", _GEMMA3, _SIGLIP, mm_tokens_per_image=4, image_token_index=IMAGE),
        _fixed(4),
        since="5.6",
    ),
    "idefics3": Family("Idefics3", _idefics("Idefics3"), _fixed(4, masks=True)),
    "smolvlm": Family("SmolVLM", _idefics("SmolVLM"), _fixed(4, masks=True)),
    "llava": Family("LLaVA", partial(_made, "Llava", {"model_type": "llama"}, _SIGLIP | _CLIP, **_LLAVA), _fixed(16)),
}


def alone(model: nn.Module, sample: dict[str, Any]) -> Tensor:
    """Logits [T, V] of plain transformers for one sample, with the inputs that its processor gives."""
    ids = torch.tensor(sample["input_ids"])[None]
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    types = torch.tensor(sample["mm_token_type_ids"])[None] if "mm_token_type_ids" in sample else None
    kind = model.config.model_type
    for name in ("pixel_values", "image_grid_thw", "pixel_attention_mask"):
        if name in sample:
            inputs[name] = sample[name]
            if kind in ("idefics3", "smolvlm"):
                inputs[name] = sample[name][None]
            if name == "pixel_values":
                inputs[name] = inputs[name].to(next(model.parameters()).dtype)
    if types is not None and kind.startswith("qwen"):
        inputs["mm_token_type_ids"] = types
    elif types is not None and kind == "gemma3":
        inputs["token_type_ids"] = types
    return model(**inputs, use_cache=False).logits[0]
