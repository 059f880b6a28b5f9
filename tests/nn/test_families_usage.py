"""What users do with models beside training them plainly: adapters, autocast, generation, attention weights."""

from __future__ import annotations

import contextlib

import peft
import pytest
import torch
from torch import nn

from odc_triton import MixedPrecisionPolicy, fully_shard, memory_plan, minibatch
from odc_triton.nn.families import FusedProjections
from odc_triton.nn.replace import replace_layers
from tests.nn.test_families import KERNELS, QKV
from tests.support.families import with_lora
from tests.support.gradients import assert_same_gradients
from tests.support.models import ALL_CASES, build, microbatches
from tests.support.parity import BODY, WITH_HEAD, one_step, relative


def replaced(model: nn.Module, roles: tuple[str, ...] = BODY, choice: str = "auto") -> nn.Module:
    replace_layers(model, roles=roles, choice=choice, verbose=False)
    return model


def test_lora_on_o_proj_beside_a_fused_projection() -> None:
    def adapted() -> nn.Module:
        torch.manual_seed(1)
        options = peft.LoraConfig(target_modules=["o_proj"], init_lora_weights=False)
        return peft.inject_adapter_in_model(options, build("Llama"))

    _, want = one_step(adapted(), "Llama", [3, 2])
    calls, inner = [], FusedProjections._is_fused
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FusedProjections, "_is_fused", lambda self, x: calls.append(inner(self, x)) or calls[-1])
        _, got = one_step(fully_shard(replaced(adapted(), choice=QKV), backend="cpu"), "Llama", [3, 2])
    assert calls == [True] * 4  # two layers, two microbatches
    assert_same_gradients(got, want, floor=0.0)


def test_frozen_weights_have_no_gradient_shards() -> None:
    def adapted() -> nn.Module:
        return with_lora(replaced(build("Llama")))

    plan, model = memory_plan(adapted(), 1, backend="cpu"), fully_shard(adapted(), backend="cpu-sharded")
    heap = model._odc_engine.heap
    assert plan.gradient_shard_bytes == sum(4 * p.numel() for p in model.parameters() if p.requires_grad) > 0
    assert heap.size_bytes == heap._data_offset + plan.compute_shard_bytes + plan.gradient_shard_bytes
    parameters = model._odc_engine.parameters
    assert len(parameters) == 21 + 2 * 3 * 2  # of Llama; A and B at three places in two layers
    for parameter in parameters:
        assert (parameter.shard.gradient_shard is not None) == ("lora_" in parameter.name), parameter.name


@pytest.mark.parametrize(("backend", "choice", "roles"), [("cpu", "auto", BODY), ("cpu-sharded", KERNELS, WITH_HEAD)])
def test_autocast(backend: str, choice: str, roles: tuple[str, ...]) -> None:
    """Weights are fp32 and x is bf16: no operator of ours, so plain torch on whole weights does it."""
    want_loss, want = one_step(build("Llama"), "Llama", autocast=True)
    model = fully_shard(replaced(build("Llama"), roles, choice), backend=backend)
    loss, got = one_step(model, "Llama", autocast=True)
    fused_head = "head" in roles
    # The fused head multiplies in fp32 where autocast would have in bf16, of 8 bits of mantissa; the rest is the same.
    assert loss == pytest.approx(want_loss, rel=1e-3 if fused_head else 1e-6)
    assert_same_gradients(got, want, 3e-2 if fused_head else 1e-5, floor=0.0)
    name = "model.layers.0.mlp.up_proj.weight"
    _, in_fp32 = one_step(build("Llama"), "Llama")
    assert relative(want[name], in_fp32[name]) > 1e-3  # that it was autocast shows


@pytest.mark.parametrize(("name", "choice"), [("Llama", "auto"), ("Qwen3", QKV)])
def test_bf16_by_policy(name: str, choice: str) -> None:
    (batch,), plain, fp32 = microbatches(name, [5], 0), build(name), build(name)
    for parameter in plain.parameters():
        parameter.data = parameter.data.bfloat16()  # the rotary embedding's buffers stay fp32
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = fully_shard(replaced(build(name), choice=choice), backend="cpu-sharded", mp_policy=policy)
    losses = {}
    for each in (plain, fp32, model):
        with minibatch(model, tokens=1) if each is model else contextlib.nullcontext():
            losses[each] = ALL_CASES[name].loss(each, batch)
            losses[each].backward()
    # Of bf16: 8 bits of mantissa in each activation.
    torch.testing.assert_close(losses[model], losses[plain], rtol=1e-2, atol=0)
    gradients = [{key: p.grad.float() for key, p in each.named_parameters()} for each in (plain, fp32)]
    got = {key: p.grad.to_local() for key, p in model.named_parameters()}
    assert {gradient.dtype for gradient in got.values()} == {torch.float32}
    assert_same_gradients(got, gradients[0], 5e-2, floor=1e-2)
    assert_same_gradients(got, gradients[1], 5e-2, floor=1e-2)


@pytest.mark.slow
def test_generation_with_a_cache_after_a_step() -> None:
    ids = torch.randint(3, 97, (2, 7), generator=torch.Generator().manual_seed(6))
    ids[0, :3] = 0
    options = {"attention_mask": (ids != 0).long(), "max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    sharded = fully_shard(replaced(build("Mistral"), WITH_HEAD, QKV), backend="cpu-sharded")
    found = []
    for model, steps in ((build("Mistral"), 0), (build("Mistral"), 1), (sharded, 1)):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(steps):
            one_step(model, "Mistral", [4, 3])
            optimizer.step()
        found.append(model.eval().generate(ids, **options))
    assert torch.equal(found[2].sequences, found[1].sequences)
    untrained, want, got = (torch.stack(each.logits) for each in found)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)  # fp32, in another order
    assert (want - untrained).abs().max() > 1e-2  # that it made a step shows
