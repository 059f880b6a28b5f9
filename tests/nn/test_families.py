"""Models of transformers with our layers, sharded, against plain transformers in one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from odc_triton import fully_shard
from odc_triton.nn import Embedding, Linear, LMHead
from odc_triton.nn.families import FusedProjections
from odc_triton.nn.replace import replace_layers
from tests.support import slow
from tests.support.gradients import assert_same_gradients
from tests.support.models import build
from tests.support.parity import BODY, FEW, WITH_HEAD, compare_each, one_step

KERNELS = "triton/direct/fused"
QKV = "qkv=triton/direct/fused"

# What is trained, and how it is changed before, or after, or is replaced: see `TRANSFORMS` in parity.py.
RUNS: dict[str, list[tuple[str, str]]] = {
    "cpu": [
        ("Llama", "layers"),
        ("qwen2", "head"),
        ("Phi3", "body"),
        ("bert", "eager"),
        ("Llama", "lora+body"),
        ("Qwen2, tied", "lora+layers"),
        ("Qwen3", "checkpointing+body"),
    ],
    "cpu-sharded": [
        *((name, "body") for name in ("Mistral", "Qwen2", "gpt2-tied", "Qwen3Moe")),
        ("gpt2-tied", "head"),
        ("Qwen2, tied", "layers"),
        ("Qwen2, tied", "eager"),
        ("Qwen2, tied", "embedding"),  # the unit's whole weight, and rows of the same one
        ("Qwen2, tied", "linear"),
        ("Qwen3", "body+lora"),
        ("Llama", "layers+lora"),  # its head is frozen: it gives its input a gradient, and none to its owners
        ("Qwen3", "reentrant+body"),
        ("llama", "qkv"),  # heads that the kernel does not know
    ],
}
BY_KERNELS = [("llama", "direct"), ("Qwen2", "qkv"), ("Llama", "lora+qkv")]


@pytest.mark.parametrize("backend", [slow("cpu"), "cpu-sharded"])
def test_steps(backend: str) -> None:
    compare_each(RUNS[backend], 2, backend=backend, steps=2)


@pytest.mark.slow
def test_a_step_by_kernels() -> None:
    """LoRA wraps q_proj; a fused projection would read its weight and skip the adapter."""
    compare_each(BY_KERNELS, 2, backend="cpu-interpreter", steps=1, sizes=FEW)


_PROJECTIONS = ", ".join(f"model.layers.*.self_attn.{each}_proj (2)" for each in "qkvo")
_MLP = ", ".join(f"model.layers.*.mlp.{each}_proj (2)" for each in ("gate", "up", "down"))
_UNKNOWN = "of an unknown family"
FOUND = {
    "Llama": f"attention: model.layers.*.self_attn (2)\nembedding: model.embed_tokens\nlinear: lm_head, {_MLP}",
    "llama": (
        f"attention: none\nembedding: model.embed_tokens\nlinear: lm_head, {_PROJECTIONS}, {_MLP}\n"
        "left alone: model.layers.*.self_attn (2), its heads have 8 elements; "
        "the kernel supports 16, 32, 64, 128, 256"
    ),
    "GPT2": (  # tied; its blocks' weights are Conv1D's
        "attention: none\nembedding: transformer.wte, transformer.wpe\nlinear: lm_head\n"
        f"left alone: transformer.h.*.attn (2), a GPT2Attention, {_UNKNOWN}\n"
        "left alone: transformer.h.*.attn.c_attn (2), transformer.h.*.attn.c_proj (2), "
        "transformer.h.*.mlp.c_fc (2), transformer.h.*.mlp.c_proj (2), a Conv1D, not a Linear"
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_is_replaced(name: str) -> None:
    model = build(name)
    before = {key: type(module) for key, module in model.named_modules()}
    state = model.state_dict(keep_vars=True)
    replaced = replace_layers(model, verbose=False)
    assert str(replaced) == FOUND[name]
    after = model.state_dict(keep_vars=True)
    assert list(after) == list(state)
    assert all(after[key] is value for key, value in state.items())
    kinds = {"attention": FusedProjections, "embedding": Embedding, "linear": Linear}
    expected = {key: kinds[role] for role, keys in replaced.swapped.items() for key in keys}
    for key in replaced.swapped["attention"]:
        expected |= {f"{key}.{each}_proj": Linear for each in "qkvo"}
    for key, module in model.named_modules():
        assert isinstance(module, before[key])  # for code that looks for modules of a class
        assert isinstance(module, expected[key]) if key in expected else type(module) is before[key], key
    again = replace_layers(model, verbose=False)
    assert not any(again.swapped.values())
    assert again.left == replaced.left


def test_the_head_is_replaced_beside_the_others() -> None:
    model = build("Llama")
    replaced = replace_layers(model, roles=WITH_HEAD, verbose=False)
    assert replaced.swapped["head"] == ["lm_head"]
    assert "lm_head" not in replaced.swapped["linear"]
    assert type(model.lm_head) is LMHead


class Doubled(LlamaAttention):
    def forward(self, *args: object, **kwargs: object) -> tuple:
        out, weights = super().forward(*args, **kwargs)
        return 2 * out, weights


class HalvedLinear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / 2


class DoubledNorm(Qwen3RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def _extra_norm(attention: nn.Module) -> None:
    attention.norm = LlamaRMSNorm(64)
    nn.init.constant_(attention.norm.weight, 3)
    attention.q_proj.register_forward_pre_hook(lambda module, args: attention.norm(args[0]))


def _replaced_forward(module: nn.Module, changed: Callable) -> None:
    inner = module.forward
    module.forward = lambda *args, **kwargs: changed(inner(*args, **kwargs))


def _hook(module: nn.Module, factor: float) -> None:
    module.register_forward_hook(lambda module, args, output: factor * output)


# Of the first layer's attention: what is done to it, in which family, why it is left; None where that is for us to say.
LEFT: dict[str, tuple[str, Callable[[nn.Module], None], str | None]] = {
    "derived": (
        "Llama",
        lambda attention: setattr(attention, "__class__", Doubled),
        f"a {__name__}.Doubled, derived from LlamaAttention",
    ),
    "forward": (
        "Llama",
        lambda attention: _replaced_forward(attention, lambda found: (2 * found[0], None)),
        "its forward was replaced",
    ),
    "extra norm": ("Llama", _extra_norm, "its parts differ from LlamaAttention's by norm"),
    "other linear": (
        "Llama",
        lambda attention: setattr(attention.q_proj, "__class__", HalvedLinear),
        f"its q_proj is a {__name__}.HalvedLinear",
    ),
    "hook": (
        "Llama",
        lambda attention: _hook(attention.k_proj, 0.5),
        "its k_proj has hooks, or another forward than its class",
    ),
    "one bias": (
        "Llama",
        lambda attention: setattr(attention.v_proj, "bias", nn.Parameter(torch.ones(32))),
        "of q_proj, k_proj and v_proj some have a bias and some have none",
    ),
    "forward of q": ("Llama", lambda attention: _replaced_forward(attention.q_proj, lambda found: found / 2), None),
    "other norm": ("Qwen3", lambda attention: setattr(attention.q_norm, "__class__", DoubledNorm), None),
    "hook on a norm": ("Qwen3", lambda attention: _hook(attention.k_norm, 2), None),
    "two eps": ("Qwen3", lambda attention: setattr(attention.k_norm, "variance_epsilon", 5.0), None),
}
AFTERWARDS = ["other linear", "hook", "forward of q", "other norm", "hook on a norm", "two eps"]


@pytest.mark.parametrize("change", LEFT)
def test_attention_of_another_structure_is_left_alone(change: str) -> None:
    name, make, why = LEFT[change]
    model = build(name)
    make(model.model.layers[0].self_attn)
    replaced = replace_layers(model, choice=QKV, verbose=False)
    assert replaced.swapped["attention"] == ["model.layers.1.self_attn"]
    assert why is None or replaced.left["model.layers.0.self_attn"] == why
    assert "model.layers.0.self_attn" in replaced.left
    assert not isinstance(model.model.layers[0].self_attn, FusedProjections)


@pytest.mark.parametrize("change", AFTERWARDS)
def test_parts_that_change_after_it_was_replaced_are_called(change: str) -> None:
    """One step by kernels, in attention that still has them, against plain transformers."""
    name, make, _ = LEFT[change]
    model, plain = build(name), build(name)
    assert len(replace_layers(model, roles=BODY, choice=QKV, verbose=False).swapped["attention"]) == 2
    for each in (model, plain):
        make(each.model.layers[0].self_attn)
    (unchanged, _), (want, gradients) = one_step(build(name), name, [3]), one_step(plain, name, [3])
    assert abs(want - unchanged) > 1e-3 * want  # else this could not fail
    loss, got = one_step(fully_shard(model, backend="cpu-sharded"), name, [3])
    assert loss == pytest.approx(want, rel=1e-5)  # fp32, in another order
    assert_same_gradients(got, gradients, floor=0.0)


def test_dropout_of_attention_is_of_training_alone() -> None:
    model, plain = build("Llama"), build("Llama")
    replace_layers(model, roles=BODY, choice=QKV, verbose=False)
    for each in (model, plain):
        for layer in each.model.layers:
            layer.self_attn.attention_dropout = 0.5
    fully_shard(model, backend="cpu-sharded")
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        want, got, dropped = plain.eval()(ids).logits, model.eval()(ids).logits, model.train()(ids).logits
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)  # fp32, in another order
    assert (dropped - want).norm() > 0.01 * want.norm()
