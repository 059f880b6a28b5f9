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
    torch.testing.assert_close(dict(got), want, rtol=0, atol=0)
    assert all(value.is_contiguous() for _, value in got)


@pytest.mark.parametrize("name", ["qwen2", "gpt2-tied"])  # the second has its weights transposed
def test_lora_is_added(name: str) -> None:
    import peft

    targets = {"qwen2": ["q_proj", "down_proj"], "gpt2-tied": ["c_attn", "c_proj"]}[name]
    how = {"fan_in_fan_out": name != "qwen2", "init_lora_weights": False}
    config = peft.LoraConfig(r=4, lora_alpha=12, target_modules=targets, **how)

    def adapted() -> torch.nn.Module:
        torch.manual_seed(1)
        return peft.get_peft_model(build(name), config)

    want = adapted().merge_and_unload()
    untouched = build(name).state_dict()
    got = dict(PretrainedTensors(fully_shard(adapted())))
    torch.testing.assert_close(got, dict(want.named_parameters()), rtol=1e-5, atol=1e-6)  # one product, one sum of fp32
    changed = {name for name, value in got.items() if not torch.equal(value, untouched[name])}
    assert changed == {name for name in got if name.rsplit(".", 2)[1:] in [[target, "weight"] for target in targets]}


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
