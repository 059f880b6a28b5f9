"""Compares small models trained by ODC with one process without it, trained on all ranks' microbatches together."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from odc_triton import full_parameters, fully_shard, minibatch, repeating
from odc_triton.hf import compute_in_chunks
from odc_triton.nn.operand import is_sharded
from odc_triton.nn.replace import replace_layers
from tests.support import ranks
from tests.support.families import with_lora
from tests.support.gradients import gradients_of
from tests.support.models import ALL_CASES, Case, build, microbatches
from tests.support.replicas import mesh_of

SIZES = [5, 17, 3, 9, 1]  # of one minibatch's microbatches, all ranks together
FEW = [4, 3, 2]  # for kernels in the interpreter

# Which microbatches each rank runs: unequal counts, and ranks with none.
DEALS = {1: [[0, 1, 2, 3, 4]], 2: [[0, 1, 3, 4], [2]], 3: [[1], [], [0, 2, 3, 4]], 4: [[], [0, 4], [1], [2, 3]]}

# Without RoPE, attention biases of keys have no gradient in exact arithmetic: it is all rounding, and AdamW blows it up
# to full steps (GPT-2's c_attn.bias contains them).
ZERO_GRADIENT = ("c_attn.bias", "self.key.bias")
# With RoPE their gradient is small compared with its terms, and AdamW turns its rounding into full steps: up to 1.1e-4.
FAINT_GRADIENT = ("k_proj.bias",)


def _optimizer(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-3, foreach=kind == "foreach", fused=kind == "fused")


def transformed(name: str, transforms: Sequence[str]) -> nn.Module:
    model = build(name)
    for transform in transforms:
        model = TRANSFORMS[transform](model)
    return model


Trained = tuple[dict, dict, list[float], list[float]]
"""Gradients of the first minibatch, weights after the last, gradient norms, this process's part of the losses."""


@functools.cache
def unsharded_as(
    name: str, steps: int, transforms: tuple[str, ...], sizes: tuple[int, ...], device: str = "cpu"
) -> Trained:
    torch.set_num_threads(1)
    case = ALL_CASES[name]
    model = transformed(name, transforms).to(device)
    optimizer = _optimizer(model, "plain")
    first, norms, losses = {}, [], []
    for step in range(steps):
        batches = _batches(name, sizes, step, device)
        total = sum(case.count(batch) for batch in batches)
        losses.append(0.0)
        for batch in batches:
            loss = case.loss(model, batch) / total
            loss.backward()
            losses[-1] += loss.item()
        if step == 0:
            first = gradients_of(model)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    return first, {key: p.detach().clone() for key, p in model.named_parameters()}, norms, losses


def _batches(name: str, sizes: Sequence[int], step: int, device: str) -> list[tuple]:
    return [tuple(value.to(device) for value in batch) for batch in microbatches(name, sizes, seed=step)]


def sharded(
    rank: int,
    world: int,
    runs: Sequence[tuple[str, str]],
    steps: int,
    kind: str,
    style: str,
    backend: str,
    exact: bool,
    sizes: tuple[int, ...],
    shape: tuple[int, ...] = (),
    device: str = "cpu",
) -> list[Trained]:
    """Each run's. Rank 1 alone evaluates after the fifth step."""
    found, mesh = [], mesh_of(shape) if shape else None
    for name, transform in runs:
        case, model = ALL_CASES[name], transformed(name, transform.split("+"))
        if style == "bottom-up":
            for block in model.model.layers:
                fully_shard(block, mesh=mesh, backend=backend, exact=exact)
        fully_shard(model, mesh=mesh, backend=backend, exact=exact)
        optimizer = _optimizer(model, kind)
        first, norms, losses = {}, [], []
        for step in range(steps):
            batches = _batches(name, sizes, step, device)
            mine = [batches[index] for index in DEALS[world][rank] if index < len(batches)]
            optimizer.zero_grad()

            losses.append(repeating(functools.partial(_minibatch, model, case, mine)))
            if step == 0:
                first = gradients_of(model)
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor().item())
            optimizer.step()
            if step % 2:
                optimizer.zero_grad()
            if step == 4 and rank == 1:
                with torch.no_grad():
                    case.loss(model, batches[0])
        found.append((first, dict(full_parameters(model)), norms, losses))
    return found


def _minibatch(model: nn.Module, case: Case, mine: Sequence[tuple]) -> float:
    total = 0.0
    with minibatch(model, tokens=sum(case.count(batch) for batch in mine)) as mb:
        model.zero_grad(set_to_none=False)
        for batch in mine:
            loss = case.loss(model, batch) / mb.tokens
            loss.backward()
            total += loss.item()
    return total


def one_step(
    model: nn.Module, name: str, sizes: Sequence[int] = FEW, autocast: bool = False
) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss and gradients of a minibatch in this process, of a model that is sharded or plain."""
    case, batches, total = ALL_CASES[name], microbatches(name, sizes, seed=0), 0.0

    def loss_of(model: nn.Module, batch: tuple) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return case.loss(model, batch)

    if is_sharded(model):
        total = _minibatch(model, replace(case, loss=loss_of), batches)
    for batch in () if is_sharded(model) else batches:
        loss = loss_of(model, batch) / sum(map(case.count, batches))
        loss.backward()
        total += loss.item()
    return total, gradients_of(model)


def _checkpointing(model: nn.Module, use_reentrant: bool) -> nn.Module:
    model.train()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # renamed in transformers 5.23, not yet in 5.17
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    if use_reentrant:
        model.enable_input_require_grads()
    return model


def _in_chunks(model: nn.Module) -> nn.Module:
    assert compute_in_chunks(model, tokens=2)
    return model


def _frozen(model: nn.Module) -> nn.Module:
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].mlp.requires_grad_(False)
    return model


def packed(model: nn.Module, bits: int = 4) -> nn.Module:
    """With bitsandbytes' layers in the place of the blocks' Linears."""
    from bitsandbytes.nn import Linear4bit, Linear8bitLt

    for name, layer in list(model.named_modules()):
        if type(layer) is nn.Linear and "layers." in name:
            sizes = layer.in_features, layer.out_features, layer.bias is not None
            made: Any = (
                Linear4bit(*sizes, quant_type="nf4") if bits == 4 else Linear8bitLt(*sizes, has_fp16_weights=False)
            )
            made.load_state_dict(layer.state_dict())
            model.set_submodule(name, made.to("cpu"))
    return model.requires_grad_(False)


BODY = ("attention", "embedding", "linear")
WITH_HEAD = (*BODY, "head")


def _replaced(model: nn.Module, *roles: str, choice: str = "auto") -> nn.Module:
    if not (roles or any(name.endswith("lm_head") for name, _ in model.named_modules())):
        roles = ("embedding", "linear")
    replaced = replace_layers(model, roles=roles or WITH_HEAD, choice=choice, verbose=False)
    assert any(replaced.swapped.values())
    return model


TRANSFORMS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "none": lambda model: model,
    "head": lambda model: _replaced(model, "head"),
    "layers": _replaced,
    "body": lambda model: _replaced(model, *BODY),
    "embedding": lambda model: _replaced(model, "embedding"),
    "linear": lambda model: _replaced(model, "linear"),
    "experts": lambda model: _replaced(model, "experts", choice="experts=eager/staged"),
    "eager": functools.partial(_replaced, choice="eager/direct/fused"),
    "direct": functools.partial(_replaced, choice="triton/direct/fused"),
    "staged": functools.partial(_replaced, choice="triton/staged/whole"),
    "gathered": functools.partial(_replaced, choice="triton/gathered/fused"),
    "qkv": lambda model: _replaced(model, *BODY, choice="qkv=triton/gathered/whole"),
    "checkpointing": functools.partial(_checkpointing, use_reentrant=False),
    "reentrant": functools.partial(_checkpointing, use_reentrant=True),
    "chunks": _in_chunks,
    "frozen": _frozen,
    "lora": with_lora,
    "nf4": packed,
    "int8": functools.partial(packed, bits=8),
}
REPLACING = ("chunks", "head", "layers", "body", "embedding", "linear", "eager", "direct", "staged", "gathered", "qkv")
REPLACING += ("experts",)


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got - want).norm() / want.norm().clamp_min(1e-30)).item()


def whole_model_error(got: dict, want: dict) -> float:
    squares = sum((got[key] - want[key]).double().norm() ** 2 for key in want)
    return (squares / sum(want[key].double().norm() ** 2 for key in want)).sqrt().item()


def compare_each(
    runs: Sequence[tuple[str, str]],
    world: int,
    kind: str = "fused",
    style: str = "root",
    backend: str = "cpu",
    *,
    steps: int,
    exact: bool = False,
    sizes: Sequence[int] = SIZES,
    shape: tuple[int, ...] = (),
) -> None:
    """Of many (name, transform) in one launch of ranks: names in TRANSFORMS, joined by +; the unsharded model keeps its
    own layers. `shape`: of a mesh of replicas.
    """
    sizes = tuple(sizes)
    trained = ranks.run(sharded, world, runs, steps, kind, style, backend, exact, sizes, shape)
    for (name, transform), *of_ranks in zip(runs, *trained, strict=True):
        kept = tuple(each for each in transform.split("+") if each not in REPLACING)
        _assert_alike(f"{name}, {transform}", of_ranks, unsharded_as(name, steps, kept, sizes))


def _assert_alike(run: str, of_ranks: list[Trained], plain: Trained) -> None:
    want_first, want, want_norms, want_losses = plain
    losses = [sum(each) for each in zip(*(losses for *_, losses in of_ranks), strict=True)]
    # fp32 sums in another order, also below: 1e-7 per operation, amplified by ten steps of AdamW.
    torch.testing.assert_close(losses, want_losses, rtol=1e-5, atol=0, msg=lambda m: f"{run}: {m}")
    for first, weights, norms, _ in of_ranks:
        assert first.keys() == want_first.keys(), run
        for key, gradient in want_first.items():
            if key.endswith(ZERO_GRADIENT):
                torch.testing.assert_close(
                    first[key], gradient, rtol=1e-5, atol=1e-7, msg=lambda m, key=key: f"{run}, {key}: {m}"
                )
            elif gradient.numel():
                assert relative(first[key], gradient) <= 1e-5, f"{run}, {key}"
        assert weights.keys() == want.keys(), run
        assert all(torch.equal(weight, of_ranks[0][1][key]) for key, weight in weights.items()), run
        assert whole_model_error(weights, want) <= 1e-5, run
        for key, weight in want.items():
            if weight.numel() and not key.endswith(ZERO_GRADIENT):
                limit = 3e-4 if key.endswith(FAINT_GRADIENT) else 1e-4
                assert relative(weights[key], weight) <= limit, f"{run}, {key}"
        torch.testing.assert_close(norms, want_norms, rtol=1e-4, atol=0, msg=lambda m: f"{run}: {m}")
