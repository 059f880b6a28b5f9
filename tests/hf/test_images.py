"""Packs with images: as plain transformers sees each sample alone, and as one process trains them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from odc_triton import fully_shard, minibatch
from odc_triton.balance import count_target_tokens, pack_collate
from odc_triton.hf import enable_packing, summed_loss
from odc_triton.packs.loss import model_inputs
from tests.support import ranks
from tests.support.hybrids import rules_in
from tests.support.models import build
from tests.support.parity import TRANSFORMS
from tests.support.splitting import gradients
from tests.support.table_models import with_images
from tests.support.vision import FAMILIES, alone

# Text only, several images, one; by rank and microbatch: a rank without images, and one without samples.
SIZES = [(9, 0), (12, 2), (10, 1), (7, 0), (8, 3), (15, 0)]
DEALS = {1: [[[0, 1], [2, 3], [4, 5]]], 2: [[[1, 2], [4]], [[0, 3, 5]]], 3: [[[0, 1]], [], [[2, 3], [4], [5]]]}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_document_in_a_pack_has_the_logits_that_it_has_alone(family: str) -> None:
    model = FAMILIES[family].model(dtype=torch.float64).eval()
    samples = FAMILIES[family].samples(SIZES[:4])
    with rules_in(torch.float64):
        wanted = torch.cat([alone(model, each) for each in samples])
        enable_packing(model)
        (pack,) = pack_collate([samples])
        assert torch.allclose(model(**model_inputs(pack, model)).logits[0], wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
def test_one_document_needs_no_packing(family: str) -> None:
    model = FAMILIES[family].model(dtype=torch.float64)
    sample = FAMILIES[family].sample(9, 2, seed=0)
    (pack,) = pack_collate([[sample]])
    wanted = F.cross_entropy(alone(model, sample)[:-1], torch.tensor(sample["labels"])[1:], reduction="sum")
    # summed_loss is in fp32
    assert torch.allclose(summed_loss(model, pack).double(), wanted, rtol=1e-6)


def test_a_family_that_is_not_supported_is_named() -> None:
    model = build("llama")
    enable_packing(model)
    (pack,) = pack_collate([FAMILIES["llava"].samples([(5, 1)])])
    with pytest.raises(
        ValueError, match="LlamaForCausalLM is of none of the families whose packs may have them: qwen2_vl"
    ):
        summed_loss(model, pack)


CHANGES = {
    "none": lambda model: model,
    "frozen tower": lambda model: _freeze(model),
    "LoRA": TRANSFORMS["lora"],
    "checkpointing": TRANSFORMS["checkpointing"],
    "replaces layers": TRANSFORMS["layers"],
    "fused head": TRANSFORMS["head"],
}


REPLACED = ("replaces layers", "fused head")


def _freeze(model: nn.Module) -> nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad = not any(part in name for part in ("visual.", "vision_tower.", "vision_model."))
    return model


def one_process(family: str, change: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Gradients by plain transformers, sample after sample, without padding or packs."""
    model = FAMILIES[family].model(dtype=dtype).train()
    if change not in REPLACED:
        model = CHANGES[change](model)
    samples = FAMILIES[family].samples(SIZES)
    targets = count_target_tokens(pack_collate([[each] for each in samples]))
    with rules_in(dtype):
        for sample in samples:
            loss = F.cross_entropy(alone(model, sample)[:-1], torch.tensor(sample["labels"])[1:], reduction="sum")
            (loss / targets).backward()  # transformers' norms are in fp32: dividing later rounds otherwise
    return gradients(model)


def _train(
    rank: int, world: int, family: str, change: str, dtype: torch.dtype, backend: str
) -> dict[str, torch.Tensor]:
    model = FAMILIES[family].model(dtype=dtype)
    with rules_in(dtype):
        enable_packing(model)
        return trained(fully_shard(CHANGES[change](model).train(), backend=backend), rank, world, family)


def trained(model: nn.Module, rank: int, world: int, family: str) -> dict[str, torch.Tensor]:
    """Gradients of a sharded model on this rank's packs."""
    samples = FAMILIES[family].samples(SIZES)
    packs = pack_collate([[samples[at] for at in pack] for pack in DEALS[world][rank]])
    with minibatch(model, tokens=count_target_tokens(packs)) as mb:
        for pack in packs:
            logits_loss(model, pack).div(mb.tokens).backward()
    return gradients(model)


def logits_loss(model: nn.Module, pack: dict[str, Any]) -> torch.Tensor:
    """`summed_loss` in the dtype of the model."""
    logits = model(**model_inputs(pack, model)).logits[0]
    return F.cross_entropy(logits[:-1], pack["labels"][0, 1:], reduction="sum")


def check(family: str, change: str, world: int, dtype: torch.dtype, backend: str) -> None:
    wanted = one_process(family, change, dtype)
    most = 1e-10 if dtype is torch.float64 else 1e-5
    for found in ranks.run(_train, world, family, change, dtype, backend):
        assert found.keys() == wanted.keys()
        scale = max(float(each.abs().max()) for each in wanted.values())
        off = {name: float((found[name] - each).abs().max()) / scale for name, each in wanted.items()}
        assert max(off.values()) <= most, sorted(off.items(), key=lambda item: -item[1])[:5]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
def test_ranks_with_and_without_images_train_together(family: str) -> None:
    check(family, "none", 2, torch.float64, "cpu")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "change"),
    [
        pytest.param(family, change, marks=with_images(family, ("trains", "packs") if change == "none" else [change]))
        for family in FAMILIES
        for change in CHANGES
    ],
)
def test_every_family_with_frozen_trained_and_adapted_towers(family: str, change: str) -> None:
    for world, dtype, backend in ((3, torch.float64, "cpu"), (2, torch.float32, "cpu-sharded")):
        if (change, dtype) != ("fused head", torch.float64):  # which it does not take
            check(family, change, world, dtype, backend)
