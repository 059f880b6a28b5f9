"""LoRA by PEFT on sharded models: the base read by shards, the adapter trained, saved, and loaded by plain PEFT."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from odc_triton import full_parameters, fully_shard, minibatch
from odc_triton.base.errors import CheckpointDiffers
from odc_triton.checkpoint import load_pretrained_shards, meta_causal_lm, save_pretrained, with_adapter
from odc_triton.checkpoint.adapter import lora_factors
from odc_triton.checkpoint.base_model import base_name, frozen_base
from odc_triton.checkpoint.dcp import read_metadata, tensors_of
from odc_triton.checkpoint.folder import load_checkpoint, write_checkpoint
from odc_triton.jobs.checkpoints.steps import Checkpoints
from tests.support import ranks
from tests.support.families import causal_lm, with_lora
from tests.support.models import CASES, build, microbatches
from tests.support.versions import since

# PEFT asks transformers by a name that is going away.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

IDS = torch.arange(3, 12)[None]
NORM = "base_model.model.model.norm.weight"


def _sharded(base: Path) -> torch.nn.Module:
    import peft

    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], lora_dropout=0.0, task_type="CAUSAL_LM")
    model = fully_shard(with_adapter(meta_causal_lm(model=str(base)), config))
    load_pretrained_shards(model, base)
    return model


def _logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


def _trained(rank: int, world: int, base: Path, folder: Path) -> tuple[torch.Tensor, torch.Tensor, int]:
    model = _sharded(base)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    first = _logits(model)
    dist.barrier()
    for step in range(2):
        with minibatch(model, tokens=1):
            for batch in microbatches("qwen2", [6, 9], seed=step)[rank::world]:
                CASES["qwen2"].loss(model, batch).backward()
        optimizer.step()
    if rank == 0:
        save_pretrained(model, folder)
    dist.barrier()
    Checkpoints(folder.parent / "run", keep=1).save(model=model, optimizer=optimizer, state={}, step=2)
    trained = _logits(model)
    model.peft_config["default"].base_model_name_or_path = ""
    Checkpoints(folder.parent / "nameless", keep=1).save(model=model, optimizer=optimizer, state={}, step=2)
    return first, trained, len(optimizer.state)


def _resumed(rank: int, world: int, bases: list[Path], run: Path) -> list[torch.Tensor | str]:
    """Logits after a checkpoint was loaded onto adapters of each base, or the error."""
    found: list[torch.Tensor | str] = []
    for base in bases:
        model, checkpoints = _sharded(base), Checkpoints(run, keep=1)
        try:
            assert checkpoints.load(checkpoints.newest(), model=model, optimizer=None) == {}
            found.append(_logits(model))
        except CheckpointDiffers as error:
            found.append(str(error))
    return found


def _names(run: Path) -> list[str]:
    names = tensors_of(read_metadata(run / "step-00000002"))
    return [name for name in names if name.startswith("model.")]


def test_an_adapter_trains_and_loads_in_peft(tmp_path: Path) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    build("qwen2", seed=3).save_pretrained(tmp_path / "base")
    outcomes = ranks.run(_trained, 2, tmp_path / "base", tmp_path / "adapter")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    with torch.no_grad():
        untouched = plain(input_ids=IDS, use_cache=False).logits
        model = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()
        want = model(input_ids=IDS, use_cache=False).logits
    assert (want - untouched).abs().max() > 0.005  # far more than what is compared below
    for first, trained, states in outcomes:
        assert states == 8  # A and B of two layers' two projections; the base has none
        # The same numbers at other addresses, for which the library may choose another kernel.
        torch.testing.assert_close(first, untouched, rtol=1e-5, atol=1e-6)  # B starts at 0
        torch.testing.assert_close(trained, want, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        other = build("qwen2", seed=3)
        other.model.norm.weight[3] += 1e-6
    other.save_pretrained(tmp_path / "other")
    # The base is in no checkpoint, unless it has no name by which it could be found again.
    assert len(_names(tmp_path / "run")) == 8
    assert all(".lora_" in name for name in _names(tmp_path / "run"))
    assert len(_names(tmp_path / "nameless")) == 8 + len(other.state_dict())
    ((got, said),) = ranks.run(_resumed, 1, [tmp_path / "base", tmp_path / "other"], tmp_path / "run")
    torch.testing.assert_close(got, outcomes[0][1], rtol=1e-5, atol=1e-6)
    assert f"only adapters, of {tmp_path / 'base'}, and the frozen weights of this model differ" in said
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "base")
    assert config["inference_mode"] is True


def test_first_values_are_pefts() -> None:
    """A of a model on the meta device is drawn as A of a real one is, B is 0."""
    import peft

    with torch.device("meta"):
        model = build("qwen2")
    adapted = with_adapter(model, peft.LoraConfig(r=4, target_modules=["q_proj"]))
    values = {name: value for name, value in adapted.named_parameters() if value.requires_grad}
    assert len(values) == 4
    for name, value in values.items():
        # Kaiming's bound for a = sqrt(5) is 1 / sqrt(fan in), here 32 inputs.
        assert (0.1 < value.abs().max() <= 32**-0.5) if "lora_A" in name else not value.any()


@since("5.23", "PEFT's load_adapter does not find what modules_to_save has")
def test_the_score_of_a_classifier(tmp_path: Path) -> None:
    """It is that of the adapter, or of the files, also below a new adapter; in those of a causal LM there is none."""
    import peft
    from transformers import AutoModelForSequenceClassification

    names = ("base", "lm", "classifier", "three", "whole")
    base, of_lm, of_classifier, of_three, whole = (tmp_path / name for name in names)
    lm = causal_lm("Qwen2", tie_word_embeddings=True)
    lm.save_pretrained(base)
    lm.name_or_path = str(base)
    lora = {"target_modules": ["q_proj"], "init_lora_weights": False}
    peft.get_peft_model(lm, peft.LoraConfig(task_type="CAUSAL_LM", **lora)).save_pretrained(of_lm)
    plain = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    adapted = peft.get_peft_model(plain, peft.LoraConfig(task_type="SEQ_CLS", **lora))
    adapted.base_model.model.score.modules_to_save["default"].weight.data.fill_(3.0)
    adapted.save_pretrained(of_classifier)
    merged = adapted.merge_and_unload()
    merged.save_pretrained(whole)

    def loaded(source: Path, **new: Any) -> dict[str, torch.Tensor]:
        model = meta_causal_lm(model=str(source), scores=True)
        model = fully_shard(with_adapter(model, peft.LoraConfig(**new)) if new else model)
        load_pretrained_shards(model, source)
        return dict(full_parameters(model))

    q_proj = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(loaded(of_lm)[q_proj], lm.state_dict()["model.layers.0.self_attn.q_proj.base_layer.weight"])
    found = loaded(of_classifier)
    torch.testing.assert_close(found[q_proj], merged.get_parameter(q_proj).detach())  # products in another order
    assert found["score.weight"].unique().tolist() == [3.0]
    three = AutoModelForSequenceClassification.from_pretrained(base, num_labels=3)
    adapted = peft.get_peft_model(three, peft.LoraConfig(task_type="SEQ_CLS", **lora))
    adapted.base_model.model.score.modules_to_save["default"].weight.data.fill_(4.0)
    adapted.save_pretrained(of_three)
    with torch.device("meta"):
        three = AutoModelForSequenceClassification.from_config(three.config)
    load_pretrained_shards(three := fully_shard(three), of_three)
    assert dict(full_parameters(three))["score.weight"].unique().tolist() == [4.0]
    found = loaded(whole, task_type="SEQ_CLS", target_modules=["q_proj"])
    assert found["base_model.model.score.modules_to_save.default.weight"].unique().tolist() == [3.0]


def test_checkpoints_of_wrapped_blocks_that_older_versions_wrote(tmp_path: Path) -> None:
    """Their digests have the wrappers' names, and their files the weights below them."""
    import peft

    build("qwen2").save_pretrained(tmp_path / "base")
    model: Any = with_adapter(meta_causal_lm(model=str(tmp_path / "base")), peft.LoraConfig(target_modules=["q_proj"]))
    layers = model.base_model.model.model.layers
    for number, layer in enumerate(layers):
        layers[number] = checkpoint_wrapper(layer)
    load_pretrained_shards(model := fully_shard(model), tmp_path / "base")
    old, (factor, *_) = tmp_path / "old", (each for each in model.parameters() if each.requires_grad)
    with mock.patch("odc_triton.checkpoint.base_model.frozen_base", partial(frozen_base, as_before=True)):
        write_checkpoint(old, model=model, optimizer=torch.optim.SGD([factor]), state={}, step=1)
    assert any(name.endswith("0.self_attn.k_proj.weight") for name in tensors_of(read_metadata(old)))
    want = factor.full_tensor()
    with torch.no_grad():
        factor.zero_()
    load_checkpoint(old, model=model, optimizer=None)
    assert torch.equal(factor.full_tensor(), want)
    assert want.any()


def test_a_random_base_has_no_name(tmp_path: Path) -> None:
    """So checkpoints hold it: nothing else does."""
    import peft

    build("qwen2").config.save_pretrained(tmp_path)
    sources = {"model": (str(tmp_path), str(tmp_path)), "init": (str(tmp_path / "config.json"), None)}
    for kind, (source, name) in sources.items():
        model = meta_causal_lm(**{kind: source})
        assert base_name(with_adapter(model, peft.LoraConfig(target_modules=["q_proj"]))) == name


@pytest.mark.parametrize(
    "options",
    [
        {"use_dora": True},
        {"modules_to_save": ["lm_head"]},
        {"trainable_token_indices": [1, 8]},
        {"init_lora_weights": "pissa"},
    ],
)
def test_adapters_that_need_weights_are_refused(options: dict) -> None:
    import peft

    with pytest.raises(NotImplementedError, match="leave them out"):
        with_adapter(build("qwen2"), peft.LoraConfig(target_modules=["q_proj"], **options))


def _another_active(model: Any) -> None:
    model.add_adapter("other", model.peft_config["default"])
    model.base_model.set_adapter(["default", "other"])
    model.set_requires_grad("other", False)


def _layers(model: Any) -> list[Any]:
    return [each for each in model.modules() if hasattr(each, "scale_layer")]


# LoraConfig's options and what is done to the model, and the reason for which its adapter is not all of the policy.
MORE = [
    ({"use_dora": True}, None, "lora_magnitude_vector is not one of LoRA's two factors"),
    ({"lora_bias": True, "targets": ["q_proj"]}, None, r"lora_B\.bias is not one"),
    ({"modules_to_save": ["lm_head"]}, None, r"lm_head\.weight is not one"),
    ({"targets": ["embed_tokens"]}, None, "lora_embedding_. is not one"),
    ({"trainable_token_indices": [1, 2]}, None, "trainable_tokens_delta is not one"),
    ({}, lambda model: model.get_parameter(NORM).requires_grad_(True), f"{NORM} is not one"),
    ({}, lambda model: model.disable_adapter_layers(), "another active adapter, or is disabled"),
    ({}, lambda model: [each.scale_layer(2.0) for each in _layers(model)], "or scaled by hand"),
    ({}, _another_active, "another active adapter"),
    ({}, lambda model: model.merge_adapter(), "is merged, or a variant of LoRA"),
    ({"alora_invocation_tokens": [1], "task_type": "CAUSAL_LM"}, None, "or a variant of LoRA"),
]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("options", "change", "words"), MORE)
def test_what_is_more_than_two_factors(options: dict, change: Callable[[Any], Any] | None, words: str) -> None:
    model = with_lora(build("qwen2"), **options)
    if change is not None:
        change(model)
    with pytest.raises(NotImplementedError, match=words):
        lora_factors(model)
    assert lora_factors(build("qwen2")) == ({}, {})
