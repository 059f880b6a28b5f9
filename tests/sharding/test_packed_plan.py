"""The plan of a packed base against bitsandbytes' tensors of each weight, by transformers' rule of which are packed."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from odc_triton import memory_plan
from odc_triton.jobs.train.model import add_adapters
from tests.support.families import causal_lm
from tests.support.hybrids import hybrid

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
SIZES = {"hidden_size": 36, "intermediate_size": 52, "vocab_size": 97}  # rows that 64 does not divide


def _packs(model: nn.Module) -> set[str]:
    """Names of the weights that BitsAndBytesConfig packs by default, and of experts'."""
    from transformers.quantizers.base import get_keys_to_not_convert

    kept = get_keys_to_not_convert(model)
    linear = {f"{name}.weight" for name, each in model.named_modules() if type(each) is nn.Linear and name not in kept}
    return linear | {name for name, each in model.named_parameters() if ".experts." in name and each.ndim == 3}


def _tensors(weight: torch.Tensor, quantize: str) -> list[torch.Tensor]:
    from bitsandbytes import functional

    if quantize == "int8":
        return list(functional.int8_vectorwise_quant(weight.flatten(0, -2).half())[:2])
    packed, state = functional.quantize_4bit(weight.contiguous(), compress_statistics=True, quant_type="nf4")
    return [packed, state.absmax, state.code, state.state2.absmax, state.state2.code, state.offset]


@pytest.mark.parametrize(
    ("family", "quantize", "tied"),
    [
        ("Qwen2", "nf4", True),
        ("Qwen2", "int8", False),
        ("Qwen3Moe", "nf4", False),
        ("Qwen3Moe", "int8", True),
        ("qwen3_5_moe", "nf4", False),
    ],
)
def test_bytes_are_those_of_bitsandbytes(family: str, quantize: str, tied: bool) -> None:
    is_hybrid = family == "qwen3_5_moe"
    model = hybrid(family) if is_hybrid else causal_lm(family, **SIZES, tie_word_embeddings=tied)
    model.float().requires_grad_(False)
    names, units, weights = _packs(model), defaultdict(int), dict(model.named_parameters())
    packed = {name: sum(x.nbytes for x in _tensors(weights[name], quantize)) for name in names}
    adapted = add_adapters(model, rank=2, alpha=None, targets="q_proj,o_proj")
    trained = {name: each for name, each in adapted.named_parameters() if each.requires_grad}
    plain = {name: each for name, each in weights.items() if name not in names} | trained
    for name, n_bytes in [*packed.items(), *((name, 2 * each.numel()) for name, each in plain.items())]:
        units[name.rpartition("layers.")[2].partition(".")[0] if ".layers." in name else ""] += n_bytes
    plan = memory_plan(adapted, 1, mp_policy=BF16, quantize=quantize, backend="cpu")
    assert plan.compute_shard_bytes == sum(units.values())
    assert plan.master_shard_bytes == 4 * sum(each.numel() for each in plain.values())
    assert plan.gradient_shard_bytes == 4 * sum(each.numel() for each in trained.values())
    assert plan.dequantized_bytes == 2 * max(weights[name].numel() for name in names)
    assert plan.transient_bytes == plan.dequantized_bytes + plan.transient_gradient_bytes
    assert "dequantised weight" in str(plan)
    gathered = memory_plan(adapted, 2, mp_policy=BF16, quantize=quantize, backend="cuda").gathered_bytes
    assert gathered == units.pop("") + 2 * max(units.values())


@pytest.mark.parametrize("quantize", ["nf4", "int8"])
def test_a_model_that_bitsandbytes_has_packed_is_counted_as_it_is(quantize: str) -> None:
    import bitsandbytes as bnb

    from odc_triton.nn.packed import prepare

    def packed(old: nn.Linear) -> nn.Module:
        kind = {"nf4": bnb.nn.Linear4bit, "int8": bnb.nn.Linear8bitLt}[quantize]
        how = {"quant_type": "nf4"} if quantize == "nf4" else {"has_fp16_weights": False}
        new = kind(old.in_features, old.out_features, old.bias is not None, **how)
        new.load_state_dict(old.state_dict())
        return new.requires_grad_(False).to("cpu")

    model = causal_lm("Qwen2", **SIZES).requires_grad_(False)
    want = memory_plan(model, 2, quantize=quantize, mp_policy=BF16)
    for name in _packs(model):
        model.set_submodule(name := name.removesuffix(".weight"), packed(model.get_submodule(name)))
    plans = [memory_plan(model, 2, mp_policy=BF16)]
    prepare(model)
    for plan in (*plans, memory_plan(model, 2, mp_policy=BF16)):
        assert plan.shared_bytes == want.shared_bytes
        assert plan.master_shard_bytes == want.master_shard_bytes


def test_nothing_to_pack_is_refused() -> None:
    with pytest.raises(ValueError, match="quantize is 'nf4', and Qwen2ForCausalLM has no frozen linear layer"):
        memory_plan(causal_lm("Qwen2"), 2, quantize="nf4")
