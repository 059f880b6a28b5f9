"""Bases that are packed while they load: to the bit what bitsandbytes makes of the whole weights in one process."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.nn.parametrize import replace_parameter_4bit
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from odc_triton import fully_shard
from odc_triton.checkpoint import load_pretrained_shards, meta_causal_lm
from odc_triton.checkpoint.parameters import is_packed, read_whole, sharded_parameters
from odc_triton.checkpoint.quantise import quantise_on_meta
from odc_triton.nn.packed import prepare
from tests.support import ranks, slow
from tests.support.replicas import mesh_of

SMALL = {"vocab_size": 90, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
# 64 divides neither rows nor shards; 300 blocks and more; a weight of 4 bytes; experts; Conv1D, transposed.
MODELS: dict[str, dict[str, Any]] = {
    "odd": {"model_type": "qwen2", "hidden_size": 36, "intermediate_size": 50, "head_dim": 18} | SMALL,
    "nested": {"model_type": "qwen2", "hidden_size": 128, "intermediate_size": 151} | SMALL,
    "tiny": {"model_type": "qwen2", "hidden_size": 4, "intermediate_size": 3, "head_dim": 2} | SMALL,
    "experts": {
        **{"model_type": "qwen3_moe", "hidden_size": 36, "intermediate_size": 50, "head_dim": 18} | SMALL,
        "moe_intermediate_size": 22,
        "num_experts": 5,
        "num_experts_per_tok": 2,
    },
    "transposed": {"model_type": "gpt2", "vocab_size": 90, "n_embd": 24, "n_layer": 1, "n_head": 2},
}
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
METHODS: dict[str, dict[str, Any]] = {"nf4": NF4, "int8": {"load_in_8bit": True}}


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

    def add(state: Any, name: str) -> None:
        found.update({f"{name}.{key}": getattr(state, key) for key in ("absmax", "code", "offset")})
        found.update({f"{name}.state2.{key}": getattr(state.state2, key) for key in ("absmax", "code")})

    for module in [each for each in model.modules() if hasattr(each, "num_experts") and hasattr(each, "down_proj")]:
        for key in ("gate_up_proj", "down_proj"):
            replace_parameter_4bit(module, key, compress_statistics=True)
    for name, layer in model.named_modules():
        weight: Any = layer._parameters.get("weight")
        if type(weight).__name__ == "Params4bit":
            found[f"{name}.weight"] = weight.data
            add(weight.quant_state, f"{name}.quant_state")
        elif isinstance(layer, ParametrizationList):
            found[f"{name}.original"] = layer.original
            add(layer[0].quant_state, f"{name}.0.quant_state")
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
        torch.testing.assert_close(of_rank, wanted, rtol=0, atol=0)


DTYPES = (torch.float32, torch.bfloat16)
PAIRS = [(name, method) for name in MODELS for method in METHODS if (name, method) != ("experts", "int8")]
CASES = [(*pair, dtype) for pair in PAIRS for dtype in DTYPES]
FEW = [("odd", "nf4", torch.bfloat16), ("odd", "int8", torch.bfloat16), ("experts", "nf4", torch.float32)]
OTHERS = ((3, {}), (1, {}), (2, {"backend": "cpu-sharded"}), (4, {"mesh": (2, 2)}))
WORLDS = [(3, {}, FEW), *(slow(*each, CASES) for each in OTHERS)]


@pytest.mark.parametrize(("world", "how", "cases"), WORLDS)
def test_packed_as_by_one_process(
    world: int, how: dict[str, Any], cases: list, tmp_path_factory: pytest.TempPathFactory
) -> None:
    at = tmp_path_factory.getbasetemp() / "packing"
    found = ranks.run_all(world, *((packed, at / name, method, dtype, how) for name, method, dtype in cases))
    for (name, method, dtype), of_ranks in zip(cases, found, strict=True):
        _compare(at / name, method, dtype, of_ranks)


def test_experts_that_8_bits_do_not_take(tmp_path_factory: pytest.TempPathFactory) -> None:
    model = meta_causal_lm(model=str(tmp_path_factory.getbasetemp() / "packing" / "experts"))
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.experts \(Qwen3MoeExperts\) can't be packed by int8"):
        quantise_on_meta(model, "int8", torch.float32)


def digest(rank: int, world: int, folder: Path, threads: int) -> int:
    from odc_triton.checkpoint.base_model import frozen_base, own_sum
    from odc_triton.jobs.train.model import add_adapters

    torch.set_num_threads(threads)
    model = meta_causal_lm(model=str(folder))
    quantise_on_meta(model, "nf4", torch.float32)
    model = fully_shard(add_adapters(model, rank=2, alpha=None, targets="q_proj"))
    load_pretrained_shards(model, folder)
    return own_sum(frozen_base(model), rank, world)


@pytest.mark.slow
def test_a_base_is_the_same_for_any_number_of_threads(tmp_path: Path) -> None:
    """torch's mean of 80,000 scales depends on it, and so do scales in 8 bits."""
    write(tmp_path, MODELS["odd"] | {"hidden_size": 1024, "intermediate_size": 5120})
    one, four = (sum(ranks.run(digest, world, tmp_path, threads)) % 2**64 for world, threads in ((2, 1), (1, 4)))
    assert one == four


@pytest.mark.parametrize("method", METHODS)
def test_a_copy_of_a_prepared_model_is_apart(method: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp() / "packing" / "nested"
    config = BitsAndBytesConfig(**METHODS[method])
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.float32).train()
    prepare(model)
    ids = torch.arange(9).view(1, 9)
    expected = model(ids).logits
    copied = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data.zero_()
    del model
    assert torch.equal(copied(ids).logits, expected)
