"""The models whose layers `bench.kernels.run` measures: shapes as transformers', sizes as the checkpoints'."""

from __future__ import annotations

import pytest
import torch

from bench.kernels.problem import MODELS, TINY, Model


@pytest.mark.parametrize("model", [*MODELS.values(), TINY], ids=lambda model: model.name)
def test_shapes_are_those_of_transformers(model: Model) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

    numbers = {
        "hidden_size": model.hidden,
        "intermediate_size": model.intermediate,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocabulary,
        "num_hidden_layers": 1,
        "tie_word_embeddings": model.tied,
    }
    config = (Qwen2Config if model.qkv_bias else LlamaConfig)(**numbers)
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config)
    linears = {
        name.rpartition(".")[2].removesuffix("_proj").removeprefix("lm_"): module
        for name, module in built.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    assert {name: tuple(module.weight.shape) for name, module in linears.items()} == model.linears()
    assert {name for name, module in linears.items() if module.bias is not None} == (
        set("qkv") if model.qkv_bias else set()
    )
    assert tuple(built.get_input_embeddings().weight.shape) == (model.vocabulary, model.hidden)
    assert model.qkv()[0].rows == sum(len(linears[part].weight) for part in "qkv")


# As the checkpoints on the hub have them.
PARAMETERS = {
    "llama-3-8b": 8_030_261_248,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-32b": 32_763_876_352,
}


@pytest.mark.parametrize("name", MODELS)
def test_numbers_are_those_of_the_checkpoints(name: str) -> None:
    model = MODELS[name]
    shapes = model.linears()
    head = shapes.pop("head")
    biases = sum(shapes[part][0] for part in "qkv") if model.qkv_bias else 0
    block = sum(rows * columns for rows, columns in shapes.values()) + biases + 2 * model.hidden
    total = model.blocks * block + model.hidden + head[0] * head[1] * (1 if model.tied else 2)
    assert total == PARAMETERS[name]


def test_layers_of_one_shape_are_measured_once() -> None:
    layers = {layer.name: (layer.rows, layer.columns) for layer in MODELS["llama-3-8b"].layers()}
    assert layers == {
        "q, o": (4096, 4096),
        "k, v": (1024, 4096),
        "gate, up": (14336, 4096),
        "down": (4096, 14336),
        "head": (128256, 4096),
    }
