"""What users do with models beside training them plainly, with our layers and without: LoRA, autocast, generation…"""

from __future__ import annotations

import contextlib

import peft
import pytest
import torch
from torch import nn

from odc_triton import MixedPrecisionPolicy, fully_shard, memory_plan, minibatch
from odc_triton.nn import Linear, LMHead
from odc_triton.nn.families import FusedProjections
from odc_triton.nn.replace import replace_layers
from tests.nn.test_families import KERNELS, WITH_HEAD, compare, same
from tests.support import slow
from tests.support.families import FEW, Setup, build, microbatches, prepared, summed_loss, train, unsharded
from tests.support.parity import relative

ALL_KERNELS = {"choice": KERNELS, "backend": "cpu-interpreter", "steps": 1, "sizes": FEW}

# ---------------------------------------------------------------------- LoRA


@pytest.mark.parametrize(
    ("name", "backend", "change_first"),
    [
        ("llama", "cpu", True),
        ("qwen3", "cpu-apart", False),
        slow("llama", "cpu-apart", False),
        slow("qwen3", "cpu", False),
    ],
)
def test_ten_steps_of_lora(name: str, backend: str, change_first: bool) -> None:
    setup = Setup(name=name, backend=backend, change="lora", change_first=change_first)
    assert all("lora_" in key for key in unsharded(setup).gradients)
    compare(setup, 2)


@pytest.mark.parametrize("change_first", [True, slow(False)])
def test_kernels_do_not_skip_lora(change_first: bool) -> None:
    """LoRA stands around q_proj, whose weight the fused projection would read by itself."""
    setup = Setup(name="llama", change="lora", change_first=change_first, **ALL_KERNELS)
    without = unsharded(Setup(name="llama", steps=1, sizes=FEW)).losses[0]
    assert abs(unsharded(setup).losses[0] - without) > 1e-2 * without  # else this could not fail
    compare(setup, 2)


@pytest.mark.parametrize(
    ("name", "world", "options"),
    [
        ("qwen2", 1, {"backend": "cpu-apart", "change_first": True}),
        ("qwen2-tied", 2, {"backend": "cpu", "change_first": True}),
        ("llama", 2, {"backend": "cpu-apart", "change_first": False}),
    ],
)
def test_lora_beside_a_fused_head(name: str, world: int, options: dict) -> None:
    """The head is frozen: it gives its input a gradient, and none to its owners."""
    setup = Setup(name=name, change="lora", roles=WITH_HEAD, steps=3, **options)
    assert sum(isinstance(module, LMHead) for module in prepared(setup).modules()) == 1
    compare(setup, world)


_PEFT = "base_model.model.model.layers.*"


# PEFT asks transformers by a name that is going away.
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_what_is_replaced_around_adapters() -> None:
    """Attention whose q, k or v has adapters keeps its own forward, and is named; the layers in PEFT's are replaced."""
    for target, fused in (("v_proj", False), ("o_proj", True), ("up_proj", True)):
        model = peft.get_peft_model(build("llama"), peft.LoraConfig(target_modules=[target]))
        replaced = replace_layers(model, roles=WITH_HEAD, verbose=False)
        told = str(replaced).splitlines()
        assert (f"attention: {_PEFT}.self_attn (2)" in told) is fused
        why = f"left alone: {_PEFT}.self_attn (2), its {target} is a peft.tuners.lora.layer.Linear"
        assert told[4:] == ([] if fused else [why])
        assert "head: base_model.model.lm_head" in told
        assert all(
            type(module) in (Linear, LMHead) for key, module in model.named_modules() if isinstance(module, nn.Linear)
        )
        assert any(isinstance(module, FusedProjections) for module in model.modules()) is fused


def _lora_on_o_proj(model: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    return peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["o_proj"], init_lora_weights=False), model)


@pytest.mark.parametrize("change_first", [True, slow(False)])
def test_lora_on_o_proj_beside_a_fused_projection(change_first: bool) -> None:
    setup = Setup(name="llama", **ALL_KERNELS)
    want = train(_lora_on_o_proj(build("llama")), setup)
    if change_first:
        model = _lora_on_o_proj(build("llama"))
        replace_layers(model, choice=KERNELS, verbose=False)
    else:
        model = _lora_on_o_proj(prepared(setup))
    calls = []
    inner = FusedProjections._is_fused
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FusedProjections, "_is_fused", lambda self, x: calls.append(inner(self, x)) or calls[-1])
        got = train(fully_shard(model, backend="cpu"), setup)
    assert calls == [True] * 4  # two layers, two microbatches
    same(got.gradients, want.gradients)


@pytest.mark.parametrize("change_first", [True, False])
def test_frozen_weights_have_no_gradient_shards(change_first: bool) -> None:
    setup = Setup(name="llama", change="lora", change_first=change_first)
    plan = memory_plan(prepared(setup), 1)
    model = fully_shard(prepared(setup), backend="cpu-apart")
    heap = model._odc_engine.heap
    assert plan.gradient_shard_bytes == sum(4 * p.numel() for p in model.parameters() if p.requires_grad) > 0
    assert heap.size_bytes == heap._data_offset + plan.compute_shard_bytes + plan.gradient_shard_bytes
    parameters = model._odc_engine.parameters
    assert len(parameters) == 21 + 2 * 3 * 2  # of Llama; A and B at three places in two layers
    for parameter in parameters:
        assert (parameter.storage.gradient_shard is not None) == ("lora_" in parameter.name), parameter.name


# ---------------------------------------------------------------------- tied, checkpointed


@pytest.mark.parametrize("roles", [WITH_HEAD, *map(slow, [WITH_HEAD[:3], ("head",)]), ("linear",), ("embedding",)])
def test_tied_embeddings(roles: tuple[str, ...]) -> None:
    setup = Setup(name="qwen2-tied", roles=roles, backend="cpu-apart", steps=3)
    assert "lm_head.weight" not in unsharded(setup).gradients
    compare(setup, 2)


@pytest.mark.parametrize(
    ("change", "options"),
    [
        ("checkpointing", {"backend": "cpu"}),
        ("reentrant", {"backend": "cpu-apart"}),
        slow("checkpointing", ALL_KERNELS),
        slow("reentrant", {"backend": "cpu"}),
        slow("checkpointing", {"backend": "cpu-apart"}),
        slow("reentrant", ALL_KERNELS),
    ],
)
def test_checkpointed(change: str, options: dict) -> None:
    compare(Setup(name="qwen3", change=change, **options), 1 if "choice" in options else 2)


# ---------------------------------------------------------------------- bf16


@pytest.mark.parametrize("roles", [WITH_HEAD[:3], WITH_HEAD])
@pytest.mark.parametrize("options", [{"backend": "cpu"}, {"backend": "cpu-apart", "choice": KERNELS}])
def test_autocast(options: dict, roles: tuple[str, ...]) -> None:
    """Weights are fp32 and x is bf16: no operator of ours, so plain torch on whole weights does it."""
    setup = Setup(name="llama", steps=1, autocast=True, roles=roles, **options)
    want, in_fp32 = unsharded(setup), unsharded(Setup(name="llama", steps=1))
    got = train(fully_shard(prepared(setup), backend=setup.backend), setup)
    fused_head = "head" in roles
    # The fused head multiplies in fp32 where autocast would have in bf16, of 8 bits of mantissa; the rest is the same.
    torch.testing.assert_close(got.losses, want.losses, rtol=1e-3 if fused_head else 1e-6, atol=0)
    same(got.gradients, want.gradients, 3e-2 if fused_head else 1e-5)
    name = "model.layers.0.mlp.up_proj.weight"
    assert relative(want.gradients[name], in_fp32.gradients[name]) > 1e-3  # that it was autocast shows


@pytest.mark.parametrize(
    ("name", "choice"),
    [
        *(("llama", "auto"), ("qwen3", KERNELS), slow("llama", KERNELS), slow("qwen3", "auto")),
        *(slow("qwen2", choice) for choice in ("auto", KERNELS)),
    ],
)
def test_bf16_by_policy(name: str, choice: str) -> None:
    batch = microbatches(name, FEW, 0)[0]
    plain, fp32 = build(name), build(name)
    for parameter in plain.parameters():
        parameter.data = parameter.data.bfloat16()  # the rotary embedding's buffers stay fp32
    model = prepared(Setup(name=name, choice=choice))
    model = fully_shard(model, backend="cpu-apart", mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    losses = {}
    for each in (plain, fp32, model):
        with minibatch(model, tokens=1) if each is model else contextlib.nullcontext():
            losses[each] = summed_loss(each, batch)
            losses[each].backward()
    # Of bf16: 8 bits of mantissa in each activation.
    torch.testing.assert_close(losses[model], losses[plain], rtol=1e-2, atol=0)
    gradients = [{key: p.grad.float() for key, p in each.named_parameters()} for each in (plain, fp32)]
    got = {key: p.grad.to_local() for key, p in model.named_parameters()}
    assert {gradient.dtype for gradient in got.values()} == {torch.float32}
    same(got, gradients[0], 5e-2, floor=1e-2)
    same(got, gradients[1], 5e-2, floor=1e-2)


# ---------------------------------------------------------------------- generation, attentions


def _after_a_step(model: nn.Module, name: str) -> nn.Module:
    train(model, Setup(name=name, steps=1, sizes=FEW))
    return model.eval()


@pytest.mark.parametrize(("name", "choice"), [("mistral-window", "auto"), ("qwen2", "auto"), slow("qwen3", KERNELS)])
def test_generation_with_a_cache_after_a_step(name: str, choice: str) -> None:
    ids = torch.randint(3, 97, (2, 7), generator=torch.Generator().manual_seed(6))
    ids[0, :3] = 0
    options = {"attention_mask": (ids != 0).long(), "max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    untrained = build(name).eval().generate(ids, **options)
    want = _after_a_step(build(name), name).generate(ids, **options)
    model = prepared(Setup(name=name, choice=choice, roles=WITH_HEAD))
    got = _after_a_step(fully_shard(model, backend="cpu-apart"), name).generate(ids, **options)
    assert torch.equal(got.sequences, want.sequences)
    logits = [torch.stack(each.logits) for each in (got, want, untrained)]
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-4)  # fp32, in another order
    assert (logits[1] - logits[2]).abs().max() > 1e-2  # that it made a step shows


@pytest.mark.parametrize("choice", ["auto", KERNELS])
def test_attentions(choice: str) -> None:
    ids = microbatches("llama", FEW, 0)[0]["input_ids"]
    want = build("llama", "eager")(input_ids=ids, output_attentions=True).attentions
    model = build("llama", "eager")
    assert replace_layers(model, choice=choice, verbose=False).swapped["attention"]
    got = fully_shard(model, backend="cpu-apart")(input_ids=ids, output_attentions=True).attentions
    assert len(got) == len(want) == 2
    for layer, attention in zip(got, want, strict=True):
        assert layer.shape == (1, 4, 10, 10)
        torch.testing.assert_close(layer, attention, rtol=1e-5, atol=1e-6)  # fp32, in another order
