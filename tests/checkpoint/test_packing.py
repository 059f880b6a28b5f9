"""Bases that are packed while they load: to the bit what bitsandbytes makes of the whole weights in one process."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from odc_triton import fully_shard
from odc_triton.checkpoint import load_pretrained_shards, meta_causal_lm
from odc_triton.checkpoint.parameters import is_packed, read_whole, sharded_parameters
from odc_triton.nn.packed import quantise_on_meta
from tests.support import ranks, slow
from tests.support.replicas import mesh_of

SMALL = {"vocab_size": 90, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
# 64 divides neither rows nor shards; 300 blocks and more; a weight of 4 bytes; Conv1D, transposed.
MODELS: dict[str, dict[str, Any]] = {
    "odd": {"model_type": "qwen2", "hidden_size": 36, "intermediate_size": 50, "head_dim": 18} | SMALL,
    "nested": {"model_type": "qwen2", "hidden_size": 128, "intermediate_size": 151} | SMALL,
    "tiny": {"model_type": "qwen2", "hidden_size": 4, "intermediate_size": 3, "head_dim": 2} | SMALL,
    "transposed": {"model_type": "gpt2", "vocab_size": 90, "n_embd": 24, "n_layer": 1, "n_head": 2},
}
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
METHODS: dict[str, dict[str, Any]] = {"nf4": NF4, "int8": {"load_in_8bit": True}}
WORLDS = [(3, {}), slow(1, {}), slow(2, {"backend": "cpu-sharded"}), slow(4, {"mesh": (2, 2)})]


@pytest.fixture(scope="module", autouse=True)
def _folders(tmp_path_factory: pytest.TempPathFactory) -> None:
    for name, config in MODELS.items():
        folder = tmp_path_factory.getbasetemp() / "packing" / name
        write(folder, config)


def write(folder: Path, config: dict[str, Any]) -> None:
    from transformers import AutoConfig

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)


@functools.cache
def expected(folder: Path, method: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """By name, as ours, of `from_pretrained` on one process."""
    compute = {"bnb_4bit_compute_dtype": dtype} if method == "nf4" else {}
    config = BitsAndBytesConfig(**METHODS[method], **compute)
    found: dict[str, torch.Tensor] = {}
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=dtype)
    for name, layer in model.named_modules():
        weight: Any = getattr(layer, "weight", None)
        if type(weight).__name__ == "Params4bit":
            state = weight.quant_state
            found |= {f"{name}.weight": weight.data, f"{name}.quant_state.absmax": state.absmax}
            found |= {f"{name}.quant_state.code": state.code, f"{name}.quant_state.offset": state.offset}
            found[f"{name}.quant_state.state2.absmax"] = state.state2.absmax
            found[f"{name}.quant_state.state2.code"] = state.state2.code
        elif type(weight).__name__ == "Int8Params":
            found |= {f"{name}.weight": weight.data, f"{name}.state.scales": weight.SCB}
    return found


def packed(rank: int, world: int, folder: Path, method: str, dtype: torch.dtype, how: dict[str, Any]) -> dict[str, Any]:
    """The whole tensors of packed layers, by name."""
    model = meta_causal_lm(model=str(folder))
    quantise_on_meta(model, method, dtype)
    mesh = mesh_of(how["mesh"]) if "mesh" in how else None
    model = fully_shard(model.requires_grad_(False), mesh=mesh, backend=how.get("backend", "auto"))
    load_pretrained_shards(model, folder)
    parameters = sharded_parameters(model)
    return {
        f"{name}.{key}": read_whole(model, parameters[id(value)], None)
        for name, layer in model.named_modules()
        if is_packed(layer)
        for key, value in layer.named_parameters()
        if key != "bias"
    }


def _compare(folder: Path, method: str, dtype: torch.dtype, found: list[dict[str, torch.Tensor]]) -> None:
    wanted = expected(folder, method, dtype)
    assert len(wanted) >= 4
    for of_rank in found:
        assert of_rank.keys() == wanted.keys()
        for name, value in of_rank.items():
            assert (value.dtype, value.shape) == (wanted[name].dtype, wanted[name].shape), name
            assert torch.equal(value, wanted[name]), name


CASES = [(name, method, dtype) for name in MODELS for method in METHODS for dtype in (torch.float32, torch.bfloat16)]


@pytest.mark.parametrize(("world", "how"), WORLDS)
def test_packed_as_by_one_process(world: int, how: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    at = tmp_path_factory.getbasetemp() / "packing"
    found = ranks.run_all(world, *((packed, at / name, method, dtype, how) for name, method, dtype in CASES))
    for (name, method, dtype), of_ranks in zip(CASES, found, strict=True):
        _compare(at / name, method, dtype, of_ranks)
