"""Compares small models trained by ODC with one process without it, trained on all ranks' microbatches together."""

from __future__ import annotations

import functools
import warnings

import torch
from torch import nn

from tests.support import ranks
from tests.support.models import ALL_CASES, build, microbatches

SIZES = [5, 17, 3, 9, 1]  # of one minibatch's microbatches, all ranks together

# Which microbatches each rank runs: unequal counts, and ranks with none.
DEALS = {
    1: [[0, 1, 2, 3, 4]],
    2: [[0, 1, 3, 4], [2]],
    3: [[1], [], [0, 2, 3, 4]],
    4: [[], [0, 4], [1], [2, 3]],
}

# Without RoPE, attention biases of keys have no gradient in exact arithmetic: it is all rounding, and AdamW blows it up
# to full steps (GPT-2's c_attn.bias contains them).
ZERO_GRADIENT = ("c_attn.bias",)
# With RoPE their gradient is small compared with its terms, and AdamW turns its rounding into full steps: up to 1.1e-4.
FAINT_GRADIENT = ("k_proj.bias",)


def _optimizer(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=kind == "foreach", fused=kind == "fused")


@functools.cache
def unsharded(name: str, steps: int, transforms: tuple[str, ...] = ()) -> tuple[dict, dict, list[float]]:
    """Gradients of the first minibatch, weights after `steps`, gradient norms; by plain torch in this process."""
    torch.set_num_threads(1)
    case = ALL_CASES[name]
    model = build(name)
    for transform in transforms:
        TRANSFORMS[transform](model)
    optimizer = _optimizer(model, "plain")
    first, norms = {}, []
    for step in range(steps):
        batches = microbatches(name, SIZES, seed=step)
        total = sum(case.count(batch) for batch in batches)
        for batch in batches:
            (case.loss(model, batch) / total).backward()
        if step == 0:
            first = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    return first, {key: p.detach().clone() for key, p in model.named_parameters()}, norms


def sharded(
    rank: int,
    world: int,
    name: str,
    steps: int,
    kind: str,
    style: str,
    transforms: list[str],
    backend: str,
    exact: bool = False,
) -> tuple:
    from odc_triton import full_parameters, fully_shard, minibatch, repeating

    case = ALL_CASES[name]
    model = build(name)
    for transform in transforms:
        TRANSFORMS[transform](model)
    if style == "bottom-up":
        for block in model.model.layers:
            fully_shard(block, backend=backend, exact=exact)
    fully_shard(model, backend=backend, exact=exact)
    optimizer = _optimizer(model, kind)
    first, norms = {}, []
    for step in range(steps):
        batches = microbatches(name, SIZES, seed=step)
        mine = [batches[index] for index in DEALS[world][rank]]
        optimizer.zero_grad()

        def run(mine: list = mine) -> None:
            with minibatch(model, tokens=sum(case.count(batch) for batch in mine)) as mb:
                model.zero_grad(set_to_none=False)
                for batch in mine:
                    (case.loss(model, batch) / mb.tokens).backward()

        repeating(run)
        if step == 0:
            first = {key: p.grad.full_tensor().clone() for key, p in model.named_parameters() if p.grad is not None}
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor().item())
        optimizer.step()
        if step % 2:
            optimizer.zero_grad()
    return first, dict(full_parameters(model)), norms


def _nothing(model: nn.Module) -> None:
    pass


def _enable_checkpointing(model: nn.Module, use_reentrant: bool) -> None:
    model.train()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # renamed in transformers 5.23, not yet in 5.17
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})


def _checkpointing(model: nn.Module) -> None:
    _enable_checkpointing(model, use_reentrant=False)


def _reentrant_checkpointing(model: nn.Module) -> None:
    _enable_checkpointing(model, use_reentrant=True)
    model.enable_input_require_grads()


def _frozen(model: nn.Module) -> None:
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].mlp.requires_grad_(False)


def _fused_head(model: nn.Module) -> None:
    from odc_triton.nn.replace import replace_layers

    assert replace_layers(model, roles=["head"], verbose=False).swapped["head"]


def _replaced(model: nn.Module, choice: str) -> None:
    from odc_triton.nn.replace import replace_layers

    roles = ["attention", "embedding", "linear", "head"] if hasattr(model, "lm_head") else ["linear"]
    replaced = replace_layers(model, roles=roles, choice=choice, verbose=False)
    assert replaced.swapped["linear"] or replaced.swapped["embedding"]


TRANSFORMS = {
    "none": _nothing,
    "head": _fused_head,
    "layers": functools.partial(_replaced, choice="auto"),
    "direct": functools.partial(_replaced, choice="triton/direct/fused"),
    "staged": functools.partial(_replaced, choice="triton/staged/split"),
    "gathered": functools.partial(_replaced, choice="triton/gathered/fused"),
    "checkpointing": _checkpointing,
    "reentrant": _reentrant_checkpointing,
    "frozen": _frozen,
}
REPLACING = ("head", "layers", "direct", "staged", "gathered")


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got - want).norm() / want.norm().clamp_min(1e-30)).item()


def whole_model_error(got: dict, want: dict) -> float:
    squares = sum((got[key] - want[key]).double().norm() ** 2 for key in want)
    return (squares / sum(want[key].double().norm() ** 2 for key in want)).sqrt().item()


def compare(
    name: str,
    world: int,
    kind: str = "fused",
    style: str = "root",
    transform: str = "none",
    backend: str = "cpu",
    *,
    steps: int,
    exact: bool = False,
) -> None:
    """`transform`: names in TRANSFORMS, joined by +; the unsharded model keeps its own layers."""
    names = transform.split("+")
    want_first, want, want_norms = unsharded(name, steps, tuple(each for each in names if each not in REPLACING))
    for first, weights, norms in ranks.run(sharded, world, name, steps, kind, style, names, backend, exact):
        assert first.keys() == want_first.keys()
        for key, gradient in want_first.items():
            if key.endswith(ZERO_GRADIENT):
                torch.testing.assert_close(
                    first[key], gradient, rtol=1e-5, atol=1e-7, msg=lambda m, key=key: f"{key}: {m}"
                )
            elif gradient.numel():
                assert relative(first[key], gradient) <= 1e-5, key
        assert weights.keys() == want.keys()
        # fp32 sums in another order: 1e-7 per operation, amplified by ten steps of AdamW.
        assert whole_model_error(weights, want) <= 1e-5
        for key, weight in want.items():
            if weight.numel() and not key.endswith(ZERO_GRADIENT):
                limit = 3e-4 if key.endswith(FAINT_GRADIENT) else 1e-4
                assert relative(weights[key], weight) <= limit, key
        torch.testing.assert_close(norms, want_norms, rtol=1e-4, atol=0)
