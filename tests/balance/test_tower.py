"""TowerCost: its formula against torch's count of FLOPs in real towers; `values_of` by the forms of a sample."""

from __future__ import annotations

from copy import deepcopy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from odc_triton.balance import TowerCost, values_of

SIDE, PATCH = 64, 4  # pixels; 256 patches, so that a class token is little


def tower(family: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A model of wide images, and the fields of two of them, of different sizes where the family has that."""
    from tests.support.vision import FAMILIES

    small = FAMILIES[family].model()
    config = deepcopy(small.config)
    if family.startswith("qwen"):
        grids = torch.tensor([[1, 16, 24], [1, 12, 8]])
        fields = {"pixel_values": torch.randn(int(grids.prod(1).sum()), 3 * 2 * PATCH**2), "image_grid_thw": grids}
    else:
        config.vision_config.image_size = SIDE
        if family == "gemma3":
            config.mm_tokens_per_image, config.vision_config.vision_use_head = 16, False  # as its real models
        fields = {"pixel_values": torch.randn(2, 3, SIDE, SIDE)}
    model = type(small)(config)
    model.set_attn_implementation("eager")  # fused ones are not all counted
    return model, fields


FAMILIES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3", "idefics3", "llava"]


@pytest.mark.parametrize("family", FAMILIES)
def test_flops_of_a_towers_forward(family: str) -> None:
    pytest.importorskip("transformers")
    model, fields = tower(family)
    given = {k: v[None] for k, v in fields.items()} if family == "idefics3" else fields
    values = values_of(given)
    assert len(values) == 2
    assert sum(values) == fields["pixel_values"].numel()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.model.get_image_features(**given)
    frozen, trained = (TowerCost.from_config(model.config, trained=trained) for trained in (False, True))
    # Of LLaVA a class token is left out, 1 of 257; of Qwen products for rotary embeddings.
    assert frozen.sample(values) == pytest.approx(counter.get_total_flops(), rel=0.02)
    assert trained.sample(values) == pytest.approx(3 * frozen.sample(values))


def test_units_are_apart_and_windows_limit_attention() -> None:
    cost = TowerCost(quadratic=2.0, linear=3.0, values=10, windowed=5.0, window=4)
    assert cost.sample([]) == 0
    assert cost.sample([20]) == 2 * 4 + 5 * 4 + 3 * 2  # 2 patches, less than a window
    assert cost.sample([20, 60]) == 34 + (2 * 36 + 5 * 6 * 4 + 3 * 6)
    assert cost.sample([80]) > cost.sample([40, 40])


@pytest.mark.parametrize(
    ("sample", "values"),
    [
        ({"input_ids": [1]}, []),
        ({"pixel_values": None}, []),
        ({"pixel_values": [[0.0] * 6] * 10, "image_grid_thw": [[1, 2, 4], [1, 1, 2]]}, [48, 12]),
        ({"pixel_values": np.zeros((10, 6)), "image_grid_thw": np.array([[1, 2, 4], [2, 1, 1]])}, [48, 12]),
        ({"pixel_values": torch.zeros(8, 6, dtype=torch.bfloat16), "image_grid_thw": torch.tensor([[1, 2, 4]])}, [48]),
        ({"pixel_values": np.zeros((2, 3, 4, 5))}, [60, 60]),
        ({"pixel_values": torch.zeros(1, 2, 3, 4, 5)}, [60, 60]),
        ({"pixel_values": torch.zeros(0, 3, 4, 5)}, []),
    ],
)
def test_values_of_a_sample(sample: dict, values: list[int]) -> None:
    assert values_of(sample) == values


def test_a_config_without_images_or_sizes_is_refused_by_name() -> None:
    with pytest.raises(
        ValueError, match="SimpleNamespace has no vision_config and text_config: give that of a whole model"
    ):
        TowerCost.from_config(SimpleNamespace(hidden_size=8))
    config = SimpleNamespace(vision_config=SimpleNamespace(hidden_size=8), text_config=SimpleNamespace())
    with pytest.raises(ValueError, match="config has num_hidden_layers=None, which its cost depends on"):
        TowerCost.from_config(config)
