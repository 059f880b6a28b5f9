"""Models of transformers with our layers, sharded, against plain transformers in one process."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from odc_triton import fully_shard
from odc_triton.nn import Embedding, Linear, LMHead
from odc_triton.nn.families import FusedProjections
from odc_triton.nn.replace import replace_layers
from tests.support import ranks, slow
from tests.support.families import (
    FAMILIES,
    FEW,
    FUSED,
    Setup,
    build,
    microbatches,
    on_shards,
    prepared,
    train,
    unsharded,
)
from tests.support.parity import relative, whole_model_error

WITH_HEAD = ("attention", "embedding", "linear", "head")
KERNELS = "triton/direct/fused"
QKV = "qkv=triton/direct/fused"
# Biases of keys have no gradient in exact arithmetic where no RoPE follows, and a faint one, beside its summands, where
# it does: see test_parity.py.
ZERO_GRADIENT = ("c_attn.bias", "self.key.bias")
FAINT_GRADIENT = ("k_proj.bias",)


def compare(setup: Setup, world: int) -> None:
    want = unsharded(setup)
    trained = ranks.run(on_shards, world, setup)
    losses = [sum(each) for each in zip(*(got.losses for got in trained), strict=True)]
    # fp32 sums in another order, also below: 1e-7 per operation, amplified by ten steps of AdamW.
    torch.testing.assert_close(losses, want.losses, rtol=1e-5, atol=0)
    for got in trained:
        assert got.gradients.keys() == want.gradients.keys()
        for name, gradient in want.gradients.items():
            if name.endswith(ZERO_GRADIENT):
                torch.testing.assert_close(got.gradients[name], gradient, rtol=1e-5, atol=1e-7, msg=name)
            else:
                assert relative(got.gradients[name], gradient) <= 1e-5, name
        torch.testing.assert_close(got.norms, want.norms, rtol=1e-4, atol=0)
        assert got.weights.keys() == want.weights.keys()
        weights = {name: weight for name, weight in want.weights.items() if not name.endswith(ZERO_GRADIENT)}
        assert whole_model_error(got.weights, weights) <= 1e-5
        for name, weight in weights.items():
            assert relative(got.weights[name], weight) <= (1e-3 if name.endswith(FAINT_GRADIENT) else 1e-4), name


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_replaced(name: str) -> None:
    model = build(name)
    before = {key: type(module) for key, module in model.named_modules()}
    state = model.state_dict(keep_vars=True)
    replaced = replace_layers(model, verbose=False)
    assert str(replaced) == FAMILIES[name].found
    after = model.state_dict(keep_vars=True)
    assert list(after) == list(state)
    assert all(after[key] is value for key, value in state.items())
    kinds = {"attention": FusedProjections, "embedding": Embedding, "linear": Linear}
    expected = {key: kinds[role] for role, keys in replaced.swapped.items() for key in keys}
    for key in replaced.swapped["attention"]:
        expected |= {f"{key}.{each}_proj": Linear for each in "qkvo"}
    for key, module in model.named_modules():
        assert isinstance(module, before[key])  # for whoever looks for modules of a class
        assert isinstance(module, expected[key]) if key in expected else type(module) is before[key], key
    again = replace_layers(model, verbose=False)
    assert not any(again.swapped.values())
    assert again.left == replaced.left


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "bert"])
def test_the_head_is_replaced_beside_the_others(name: str) -> None:
    model = build(name)
    replaced = replace_layers(model, roles=WITH_HEAD, verbose=False)
    assert replaced.swapped["head"] == ["lm_head"]
    assert "lm_head" not in replaced.swapped["linear"]
    assert type(model.lm_head) is LMHead


def same(got: dict, want: dict, tolerance: float = 1e-5, floor: float = 0.0) -> None:
    """floor: of the largest gradient's norm."""
    assert got.keys() == want.keys()
    least = floor * max(gradient.norm() for gradient in want.values())
    for name, gradient in want.items():
        assert (got[name] - gradient).norm() <= tolerance * gradient.norm() + least, name


class Operators(TorchDispatchMode):
    """Counts those of ours. A Linear calls what is behind its operator without it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        module = importlib.import_module("odc_triton.nn.functional.linear")
        behind = module._forward

        def counted(*args: object) -> torch.Tensor:
            self.counts["odc::linear"] += 1
            return behind(*args)

        monkeypatch.setattr(module, "_forward", counted)

    def __torch_dispatch__(self, function: Callable, types: object, args: tuple = (), kwargs: dict | None = None):
        if function.namespace == "odc":
            self.counts[function.name()] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("choice", ["auto", KERNELS])
def test_our_operators_run(name: str, choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else all below would compare plain torch with plain torch."""
    setup = Setup(name=name, choice=choice, backend="cpu-apart")
    model = fully_shard(prepared(setup), backend=setup.backend)
    with Operators(monkeypatch) as seen:
        model(**microbatches(name, FEW, 0)[1])
    # Two layers, of four products in attention and three in the MLP, and the head.
    attention = {"odc::linear": 15} if choice == "auto" else {"odc::linear": 9, "odc::qkv": 2}
    assert dict(seen.counts) == {"odc::embedding": 1} | attention


@pytest.fixture(params=[4, slow(10)])
def steps(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.mark.parametrize(
    ("name", "world", "backend"),
    [
        *((name, 2, "cpu-apart") for name in FUSED),
        (FUSED[0], 2, "cpu"),
        *(slow(name, 2, "cpu") for name in FUSED[1:]),
        *(slow(name, 1, "cpu-apart") for name in FUSED),
    ],
)
def test_steps(name: str, world: int, backend: str, steps: int) -> None:
    compare(Setup(name=name, backend=backend, steps=steps), world)


@pytest.mark.parametrize("name", ["qwen3-moe", "phi3", "gpt2", *map(slow, ["mistral", "gemma3", "olmo2", "bert"])])
def test_steps_on_one_backend(name: str, steps: int) -> None:
    compare(Setup(name=name, backend="cpu" if name in ("phi3", "olmo2", "bert") else "cpu-apart", steps=steps), 2)


@pytest.mark.parametrize("name", ["llama", "qwen2-tied", *map(slow, ["gemma3", "gpt2"])])
def test_steps_with_the_head(name: str, steps: int) -> None:
    backend = "cpu" if name == "llama" else "cpu-apart"
    compare(Setup(name=name, backend=backend, roles=WITH_HEAD, steps=steps), 2)


@pytest.mark.parametrize("name", ["qwen2-tied", "bert"])
def test_steps_that_gather_no_unit(name: str, steps: int) -> None:
    compare(Setup(name=name, backend="cpu-apart", choice="eager/direct/fused", steps=steps), 2)


@pytest.mark.parametrize(
    ("name", "backend", "choice"),
    [
        ("llama", "cpu-interpreter", KERNELS),
        ("qwen2", "cpu-interpreter", "qkv=triton/gathered/split"),
        slow("mistral-window", "cpu-apart", KERNELS),
        slow("qwen2", "cpu", KERNELS),
        slow("qwen3", "cpu-interpreter", KERNELS),
    ],
)
def test_a_step_by_kernels(name: str, backend: str, choice: str) -> None:
    setup = Setup(name=name, backend=backend, choice=choice, steps=1, sizes=FEW)
    compare(setup, 2)


@pytest.mark.parametrize("few", [{}, {"steps": 1, "sizes": FEW}])
def test_a_window_shows(few: dict) -> None:
    full, window = (unsharded(Setup(name=name, **few)).gradients for name in ("mistral", "mistral-window"))
    name = "model.layers.0.self_attn.q_proj.weight"
    assert relative(window[name], full[name]) > 1e-2


# ---------------------------------------------------------------------- attention of another structure


class Doubled(LlamaAttention):
    def forward(self, *args: object, **kwargs: object) -> tuple:
        out, weights = super().forward(*args, **kwargs)
        return 2 * out, weights


class HalvedLinear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / 2


def _derived(attention: nn.Module) -> None:
    attention.__class__ = Doubled


def _extra_norm(attention: nn.Module) -> None:
    attention.norm = LlamaRMSNorm(32)
    nn.init.constant_(attention.norm.weight, 3)
    attention.q_proj.register_forward_pre_hook(lambda module, args: attention.norm(args[0]))


def _replaced_forward(attention: nn.Module) -> None:
    inner = attention.forward
    attention.forward = lambda *args, **kwargs: (2 * inner(*args, **kwargs)[0], None)


def _other_linear(attention: nn.Module) -> None:
    attention.q_proj.__class__ = HalvedLinear


def _hook_on_k(attention: nn.Module) -> None:
    attention.k_proj.register_forward_hook(lambda module, args, output: output / 2)


def _replaced_forward_of_q(attention: nn.Module) -> None:
    inner = attention.q_proj.forward
    attention.q_proj.forward = lambda x: inner(x) / 2


def _bias_of_one(attention: nn.Module) -> None:
    attention.v_proj.bias = nn.Parameter(torch.ones(32))


class DoubledNorm(Qwen3RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def _other_norm(attention: nn.Module) -> None:
    attention.q_norm.__class__ = DoubledNorm


def _hook_on_a_norm(attention: nn.Module) -> None:
    attention.k_norm.register_forward_hook(lambda module, args, output: 2 * output)


def _two_eps(attention: nn.Module) -> None:
    attention.k_norm.variance_epsilon = 0.5


# Of the first layer's attention: what is done to it, in which family, why it is left; None where that is for us to say.
LEFT: dict[str, tuple[str, Callable[[nn.Module], None], str | None]] = {
    "derived": ("llama", _derived, f"a {__name__}.Doubled, derived from LlamaAttention"),
    "forward": ("llama", _replaced_forward, "its forward was replaced"),
    "extra norm": ("llama", _extra_norm, "its parts differ from LlamaAttention's by norm"),
    "other linear": ("llama", _other_linear, f"its q_proj is a {__name__}.HalvedLinear"),
    "hook": ("llama", _hook_on_k, "its k_proj has hooks, or another forward than its class"),
    "one bias": ("llama", _bias_of_one, "of q_proj, k_proj and v_proj some have a bias and some have none"),
    "forward of q": ("llama", _replaced_forward_of_q, None),
    "other norm": ("qwen3", _other_norm, None),
    "hook on a norm": ("qwen3", _hook_on_a_norm, None),
    "two eps": ("qwen3", _two_eps, None),
}
AFTERWARDS = ["other linear", "hook", "forward of q", "other norm", "hook on a norm", "two eps"]


def _same_as_plain(model: nn.Module, plain: nn.Module, name: str) -> None:
    """One step by kernels, in attention that still has them, against plain transformers, and not as `name` would."""
    setup = Setup(name=name, steps=1, sizes=(3,))
    want, unchanged = train(plain, setup), unsharded(setup)
    assert abs(want.losses[0] - unchanged.losses[0]) > 1e-3 * want.losses[0]  # else this could not fail
    got = train(fully_shard(model, backend="cpu-apart"), setup)
    torch.testing.assert_close(got.losses, want.losses, rtol=1e-5, atol=0)  # fp32, in another order
    same(got.gradients, want.gradients)


@pytest.mark.parametrize("change", LEFT)
def test_attention_of_another_structure_is_left_alone(change: str) -> None:
    name, make, why = LEFT[change]
    models = build(name), build(name)
    for model in models:
        make(model.model.layers[0].self_attn)
    replaced = replace_layers(models[0], choice=QKV, verbose=False)
    assert replaced.swapped["attention"] == ["model.layers.1.self_attn"]
    assert why is None or replaced.left["model.layers.0.self_attn"] == why
    assert "model.layers.0.self_attn" in replaced.left
    assert not isinstance(models[0].model.layers[0].self_attn, FusedProjections)
    _same_as_plain(*models, name)


@pytest.mark.parametrize("change", AFTERWARDS)
def test_parts_that_change_after_it_was_replaced_are_called(change: str) -> None:
    name, make, _ = LEFT[change]
    models = build(name), build(name)
    assert len(replace_layers(models[0], choice=QKV, verbose=False).swapped["attention"]) == 2
    for model in models:
        make(model.model.layers[0].self_attn)
    _same_as_plain(*models, name)


def test_heads_that_the_kernel_does_not_know() -> None:
    setup = Setup(name="llama-8", choice=QKV, backend="cpu-apart", steps=2)
    replaced = replace_layers(build("llama-8"), choice=QKV, verbose=False)
    why = "its heads have 8 elements; the kernel supports 16, 32, 64, 128, 256"
    assert {key: value for key, value in replaced.left.items() if "self_attn" in key} == {
        f"model.layers.{layer}.self_attn": why for layer in range(2)
    }
    assert replaced.swapped["attention"] == []
    assert "model.layers.1.self_attn.k_proj" in replaced.swapped["linear"]
    compare(setup, 2)
