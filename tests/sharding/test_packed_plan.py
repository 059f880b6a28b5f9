"""The plan of a packed base against the tensors that bitsandbytes makes, by transformers' rule of what is packed."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from odc_triton import memory_plan
from odc_triton.jobs.train.model import add_adapters
from tests.support.families import causal_lm
from tests.support.hybrids import hybrid

SIZES = {"hidden_size": 36, "intermediate_size": 52, "vocab_size": 97}  # rows that 64 does not divide


def _packed(old: nn.Module, quantize: str) -> nn.Module:
    from bitsandbytes.nn import Linear4bit, Linear8bitLt
    from bitsandbytes.nn.parametrize import replace_parameter_4bit

    if not isinstance(old, nn.Linear):
        for name in ("gate_up_proj", "down_proj"):
            replace_parameter_4bit(old, name, compress_statistics=True, quant_type=quantize)
        return old
    how = {"quant_type": "nf4"} if quantize == "nf4" else {"has_fp16_weights": False}
    kind = Linear4bit if quantize == "nf4" else Linear8bitLt
    new = kind(old.in_features, old.out_features, old.bias is not None, **how)
    new.load_state_dict(old.state_dict())
    return new.requires_grad_(False).to("cpu")


@pytest.mark.parametrize(
    ("family", "quantize", "tied"),
    [("Qwen2", "nf4", True), ("Qwen2", "int8", False), ("Qwen3Moe", "nf4", False), ("qwen3_5_moe", "nf4", False)],
)
def test_bytes_are_those_of_bitsandbytes(family: str, quantize: str, tied: bool) -> None:
    from transformers.quantizers.base import get_keys_to_not_convert

    from odc_triton.nn.packed import prepare

    model = hybrid(family).float() if "_" in family else causal_lm(family, **SIZES, tie_word_embeddings=tied)
    kept = get_keys_to_not_convert(model)
    chosen = {name: each for name, each in model.named_modules() if type(each) is nn.Linear and name not in kept}
    chosen |= {name: each for name, each in model.named_modules() if name.endswith(".experts")}
    largest = max(value.numel() for each in chosen.values() for value in each.parameters(recurse=False))
    modules = {id(each) for each in chosen.values()}
    adapted = add_adapters(model, rank=2, alpha=None, targets="q_proj,o_proj")
    how = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16), "backend": "cuda"}
    plans = [memory_plan(adapted, 2, quantize=quantize, **how)]
    whole = memory_plan(adapted, 1, quantize=quantize, **how | {"backend": "cpu"})
    for name, module in [*adapted.named_modules()]:
        if id(module) in modules:
            adapted.set_submodule(name, _packed(module, quantize))
    for value in adapted.parameters():  # as `from_pretrained` in this dtype
        if type(value) is nn.Parameter and not value.requires_grad and value.is_floating_point():
            value.data = value.data.bfloat16()
    plans.append(memory_plan(adapted, 2, **how))
    prepare(adapted)
    plans.append(memory_plan(adapted, 2, **how))
    for field in ("parameters", "compute_shard_bytes", "gradient_shard_bytes", "master_shard_bytes"):
        assert len({getattr(plan, field) for plan in plans}) == 1, field
    more = 2 * largest if quantize == "nf4" else 0  # it dequantises to the dtype that it has packed, here fp32
    assert [plan.gathered_bytes - plans[0].gathered_bytes for plan in plans] == [0, more, more]
    kept = [each for each in adapted.parameters() if hasattr(each, "_odc_kept_dtype")]
    elements = sum(each.numel() for each in adapted.parameters()) - sum(each.numel() for each in kept)
    trained = sum(each.numel() for each in adapted.parameters() if each.requires_grad)
    assert whole.compute_shard_bytes == sum(each.nbytes for each in kept) + 2 * elements
    assert whole.master_shard_bytes == 4 * trained
    assert whole.gathered_bytes == 2 * largest  # dequantised
