"""A model's whole tensors: names, shapes and values as plain transformers' files have them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from odc_triton import fully_shard
from odc_triton.checkpoint.pretrained_tensors import PretrainedTensors
from tests.support.models import build

# PEFT asks transformers by a name that is going away.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


@pytest.mark.parametrize("name", ["gpt2-tied", "qwen3-moe"])
def test_as_in_a_checkpoint(name: str, tmp_path: Path) -> None:
    """Tied weights once, experts apart."""
    from safetensors.torch import load_file

    plain = build(name)
    plain.save_pretrained(tmp_path)
    want = load_file(tmp_path / "model.safetensors")
    weights = PretrainedTensors(fully_shard(plain))
    got = list(weights)
    assert len(got) == len(want)
    assert {name for name, _ in got} == set(want)
    for name, value in got:
        assert torch.equal(value, want[name]), name
        assert value.is_contiguous()


@pytest.mark.parametrize("name", ["qwen2", "gpt2-tied"])  # the second has its weights transposed
def test_lora_is_added(name: str) -> None:
    import peft

    targets = {"qwen2": ["q_proj", "down_proj"], "gpt2-tied": ["c_attn", "c_proj"]}[name]
    config = peft.LoraConfig(
        r=4, lora_alpha=12, target_modules=targets, fan_in_fan_out=name != "qwen2", init_lora_weights=False
    )

    def adapted() -> torch.nn.Module:
        torch.manual_seed(1)
        return peft.get_peft_model(build(name), config)

    want = adapted().merge_and_unload()
    untouched = build(name).state_dict()
    weights = PretrainedTensors(fully_shard(adapted()))
    got = dict(weights)
    assert set(got) == {name for name, _ in want.named_parameters()}
    for name, value in got.items():
        # One product and one sum of fp32.
        torch.testing.assert_close(value, want.get_parameter(name).detach(), rtol=1e-5, atol=1e-6)
        assert torch.equal(value, untouched[name]) is not any(
            name.endswith(f".{target}.weight") for target in targets
        ), name


def test_in_chunks() -> None:
    weights = PretrainedTensors(fully_shard(build("qwen2")))
    chunks = list(weights.chunks(20_000))
    assert [name for chunk in chunks for name, _ in chunk] == [name for name, _ in weights]
    sizes = [sum(value.nbytes for _, value in chunk) for chunk in chunks]
    assert 1 < len(chunks) < len(list(weights))
    assert all(size <= 20_000 or len(chunk) == 1 for size, chunk in zip(sizes, chunks, strict=True))
    assert all(size + chunk[0][1].nbytes > 20_000 for size, chunk in zip(sizes, chunks[1:], strict=False))


@pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed")
def test_refuses_other_models_and_adapters() -> None:
    import peft

    with pytest.raises(TypeError, match="not a transformers model"):
        PretrainedTensors(fully_shard(torch.nn.Linear(2, 2)))
    config = peft.LoraConfig(target_modules=["o_proj"], lora_bias=True)
    with pytest.raises(NotImplementedError, match=r"o_proj: PEFT can't merge it \(.*base layer has no bias"):
        PretrainedTensors(fully_shard(peft.get_peft_model(build("qwen2"), config)))
