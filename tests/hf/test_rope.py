"""Rope whose frequencies depend on a document's length: packs against each document alone in a fresh plain model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from odc_triton import hf
from odc_triton.balance import pack_collate
from odc_triton.packs.enable import takes_branches
from tests.support import slow
from tests.support.families import SIZES, causal_lm
from tests.support.gradients import assert_same_gradients, gradients_of
from tests.support.versions import since

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16, "factor": 8.0}
LONG |= {"short_factor": [1.0] * 4, "long_factor": [1.0, 4.0, 8.0, 16.0]}
PHI = {"original_max_position_embeddings": 16, "max_position_embeddings": 128}
HALF = {"partial_rotary_factor": 0.5, "short_factor": [1.0] * 2, "long_factor": [2.0, 16.0]}
MSCALE = {"short_mscale": 1.1, "long_mscale": 1.4}
BY_LAYER = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": DYNAMIC}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "longrope": ("Phi3", PHI | {"rope_parameters": LONG}),
    "dynamic": ("Qwen2", {"max_position_embeddings": 16, "rope_parameters": DYNAMIC}),
    "longrope, half of a head": ("Phi3", PHI | {"rope_parameters": LONG | HALF}),
    "longrope, scaled by length": ("Phimoe", PHI | {"rope_parameters": LONG | MSCALE}),
    "longrope, Llama": ("Llama", {"rope_parameters": LONG}),
    "dynamic, complex numbers": ("DeepseekV2", {"max_position_embeddings": 16, "rope_parameters": DYNAMIC}),
    "dynamic in some layers": ("Gemma3", {"max_position_embeddings": 16, "rope_parameters": BY_LAYER, "head_dim": 8}),
}
BEYOND = [  # by the original length, 16
    ("longrope", (10, 60, 12)),
    ("dynamic", (60, 33, 10)),  # of two beyond it the shorter is the later one
    ("dynamic", (16, 17, 15, 1)),
]
MORE = [(name, lengths) for name in FAMILIES for lengths in ((40, 10, 33), (16, 17, 15), (60,), (9, 1))]


def build(name: str) -> nn.Module:
    """In evaluation mode, with queries and keys so large that rope matters."""
    torch.manual_seed(0)
    family, sizes = FAMILIES[name]
    if family != "Phimoe":
        return causal_lm(family, spread=0.2, **sizes).eval()
    model = transformers.PhimoeForCausalLM(transformers.PhimoeConfig(**SIZES | sizes, num_local_experts=4)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.ndim > 1 else 1)
    return model


def enabled(name: str) -> nn.Module:
    model = build(name)
    hf.enable_packing(model)
    return model


def documents(lengths: tuple[int, ...]) -> list[dict[str, torch.Tensor]]:
    made = [torch.randint(3, 97, (length,), generator=torch.Generator().manual_seed(length)) for length in lengths]
    return [{"input_ids": ids, "labels": ids} for ids in made]


def alone(model: nn.Module, lengths: tuple[int, ...]) -> tuple[float, dict[str, torch.Tensor]]:
    """The summed loss and its gradients; each document is the first that its copy of the model sees."""
    total, gradients = 0.0, {}
    for each in documents(lengths):
        fresh = copy.deepcopy(model)
        ids = each["input_ids"][None]
        logits = fresh(input_ids=ids, use_cache=False).logits[0, :-1].float()
        loss = nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum")
        loss.backward()
        total += loss.item()
        for name, gradient in gradients_of(fresh).items():
            gradients[name] = gradient + gradients.get(name, 0)
    return total, gradients


@pytest.mark.parametrize(("name", "lengths"), [*BEYOND, *(slow(*each) for each in MORE)])
def test_pack_equals_each_document_alone(name: str, lengths: tuple[int, ...]) -> None:
    plain, packed = build(name), enabled(name)
    (pack,) = pack_collate([documents(lengths)])
    loss = hf.summed_loss(packed, pack)
    loss.backward()
    expected, gradients = alone(plain, lengths)
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert_same_gradients(gradients_of(packed), gradients, 1e-4)


@pytest.mark.parametrize("name", ["longrope", "dynamic"])
def test_bounds_or_positions_tell_of_documents(name: str) -> None:
    """Of rows of packs too; the body without its head is not told of bounds."""
    model = enabled(name)
    (pack,), (other,) = (pack_collate([documents(lengths)]) for lengths in ((10, 40), (33, 17)))
    want = [model(**hf.model_inputs(each, model)).logits for each in (pack, other)]
    rows = {key: torch.cat([pack[key], other[key]]) for key in ("input_ids", "position_ids")}
    torch.testing.assert_close(model(**rows, use_cache=False).logits, torch.cat(want), rtol=1e-4, atol=1e-4)
    body = model.model(**{key: pack[key] for key in rows}, use_cache=False).last_hidden_state
    torch.testing.assert_close(model.lm_head(body), want[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["longrope", "dynamic"])
def test_batches_and_generation_are_transformers_own(name: str) -> None:
    plain, packed = build(name), enabled(name)
    ids = torch.stack([each["input_ids"] for each in documents((20, 20))])
    mask = torch.ones_like(ids)
    mask[1, :12] = 0  # to the left, as for generation
    for given in ({"attention_mask": mask}, {"attention_mask": mask[:1]}):
        options = {"max_new_tokens": 8, "do_sample": False}
        count = len(given["attention_mask"])
        want = copy.deepcopy(plain).generate(ids[:count], **given, **options)
        assert torch.equal(packed.generate(ids[:count], **given, **options), want)
    want, found = (each(input_ids=ids, attention_mask=mask).logits for each in (build(name), enabled(name)))
    torch.testing.assert_close(found[mask.bool()], want[mask.bool()])


def test_prefixes_are_not_shared() -> None:
    """What samples share has other frequencies in a sample beyond the original length."""
    assert not any(takes_branches(enabled(name)) for name in ("longrope", "dynamic"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("limit", [16, 100])
def test_other_rope_by_length_is_refused(limit: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a module that transformers does not know: so longer than `limit` it stretches the whole row."""
    model = causal_lm("Qwen2", max_position_embeddings=limit).to(dtype)

    class Stretched(nn.Module):
        def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            base = 1e4 if position_ids.max() < limit else 3e4
            angles = position_ids[..., None] / base ** (torch.arange(0, 8, 2) / 8)
            angles = torch.cat([angles, angles], dim=-1)
            return angles.cos().to(x.dtype), angles.sin().to(x.dtype)

    model.model.rotary_emb = Stretched()
    with pytest.raises(hf.PackingUnsupported, match=r"Qwen2ForCausalLM can't be .* its neighbour's positions did"):
        hf.enable_packing(model)


@since("5.17", "no rope of several axes depends on the length")
def test_positions_of_several_axes_are_refused() -> None:
    """Which in a pack don't tell the rotary embedding of its documents; alone the model is as it was."""
    long = LONG | {"mrope_section": [2, 1, 1]}
    config = transformers.Qwen2VLTextConfig(**SIZES | PHI, rope_parameters=long)
    tower = {"embed_dim": 32, "mlp_ratio": 2, "depth": 1, "num_heads": 2, "hidden_size": 32}
    config = transformers.Qwen2VLConfig(text_config=config, vision_config=tower)
    model = transformers.Qwen2VLForConditionalGeneration(config).eval()
    ids = torch.arange(3, 43)[None]
    want = model(input_ids=ids).logits
    with pytest.raises(hf.PackingUnsupported, match=r"its neighbour's positions did"):
        hf.enable_packing(model)
    assert torch.equal(model(input_ids=ids).logits, want)


def test_on_meta_and_twice() -> None:
    family, sizes = FAMILIES["longrope"]
    with torch.device("meta"):
        model = causal_lm(family, **sizes)
    hf.enable_packing(model)
    hf.enable_packing(model)
    assert len(model.model.rotary_emb._forward_hooks) == 1
