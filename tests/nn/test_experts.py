"""Mixtures whose experts are read from their owners, in fp64, against plain transformers, gradient by gradient."""

from __future__ import annotations

import functools
import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from bench.whole import whole
from odc_triton import fully_shard, minibatch, repeating
from odc_triton.engine.api import engine_of
from odc_triton.engine.kept import RowsOfOwners, rows_to_keep
from odc_triton.engine.transport import LockedTransport
from odc_triton.nn.experts import Experts
from odc_triton.nn.functional.experts import gated, grouped_linear
from odc_triton.nn.replace import replace_layers
from odc_triton.nn.verification import LocalShards
from tests.support import ranks, slow
from tests.support.families import SIZES, causal_lm
from tests.support.hybrids import HYBRIDS, hybrid, lacking, rules_in
from tests.support.parity import TRANSFORMS

EXPERT = 3 * 32 * 48 * 8  # bytes of one of Mixtral's, of which a rank of two lacks four or six in two layers
FEW, MORE, LOTS = 3 * EXPERT, 10 * EXPERT, 2**30  # some copies; all and some sums

_ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}


def _made(of: str, **sizes: Any) -> nn.Module:
    config = getattr(transformers, f"{of}Config")(**SIZES | sizes, attn_implementation="eager")
    return getattr(transformers, f"{of}ForCausalLM")(config).train()


_ODD = {"num_experts_per_tok": 2, "head_dim": 8}
BUILD: dict[str, Callable[[], nn.Module]] = {
    **{name: functools.partial(causal_lm, name) for name in ("Mixtral", "Qwen2Moe", "Qwen3Moe", "GptOss")},
    **{name: functools.partial(causal_lm, name) for name in ("DeepseekV3", "Glm4Moe", "GraniteMoe")},
    "Olmoe": lambda: _made("Olmoe", num_experts=5, num_experts_per_tok=2),
    "MiniMaxM2": lambda: _made("MiniMaxM2", num_local_experts=5, rotary_dim=8, **_ODD),
    "Ernie4_5_Moe": lambda: _made("Ernie4_5_Moe", moe_num_experts=5, moe_k=2, moe_intermediate_size=16),
    "qwen3_next": functools.partial(hybrid, "qwen3_next"),
    "qwen3_5_moe": functools.partial(hybrid, "qwen3_5_moe"),
    "nemotron_h, experts": functools.partial(hybrid, "nemotron_h, experts"),
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """`skewed`: all tokens go to the same experts."""

    family: str
    backend: str = "cpu"
    how: dict[str, Any] = field(default_factory=dict)
    choice: str = "auto"
    skewed: bool = False
    checkpointing: bool = False
    dtype: torch.dtype = torch.float64


def model_of(run: Run) -> nn.Module:
    torch.manual_seed(0)
    model = BUILD[run.family]()
    model.set_experts_implementation("eager")  # others take no fp64
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    if run.checkpointing:
        TRANSFORMS["checkpointing"](model)
    for module in model.modules():
        if run.skewed and hasattr(module, "top_k") and "weight" in module._parameters:
            module.register_forward_hook(_skewed)
    return model.to(run.dtype)


def _skewed(router: Any, inputs: tuple, output: tuple) -> tuple:
    """All tokens on the last experts: nobody chooses the others."""
    logits, weights, experts = output
    return logits, weights, torch.arange(router.num_experts - experts.shape[-1], router.num_experts).expand_as(experts)


BATCHES = [torch.randint(3, 97, (1, size), generator=torch.Generator().manual_seed(size)) for size in (9, 4, 1, 13)]
DEALS = {1: [[0, 1, 2, 3]], 2: [[0, 1, 3], [2]], 3: [[1], [], [0, 2, 3]], 7: [[0], [], [1], [], [2], [], [3]]}


def _loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids, use_cache=False).logits
    return nn.functional.cross_entropy(logits[0], ids[0].roll(1), reduction="sum") / 27


def trained(rank: int, world: int, runs: list[Run]) -> list[dict[str, torch.Tensor]]:
    """Gradients of the second minibatch, after a step of SGD."""
    found = []
    for run in runs:
        model = model_of(run)
        replace_layers(model, roles=["experts"], choice=run.choice, verbose=False)
        model = fully_shard(model, backend=run.backend, **run.how)
        with rules_in(torch.float64):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            repeating(functools.partial(_minibatch, model, DEALS[world][rank]))
            optimizer.step()
            optimizer.zero_grad()
            repeating(functools.partial(_minibatch, model, DEALS[world][rank]))
        found.append({name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None})
    return found


def _minibatch(model: nn.Module, mine: list[int]) -> None:
    with minibatch(model, tokens=27):
        for each in mine:
            _loss(model, BATCHES[each]).backward()


@functools.cache
def plainly(family: str, skewed: bool, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    model = model_of(Run(family=family, skewed=skewed, dtype=dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with rules_in(torch.float64):
        for step in range(2):
            optimizer.zero_grad()
            for each in BATCHES:
                _loss(model, each).backward()
            if step == 0:
                optimizer.step()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def compare(world: int, runs: list[Run]) -> None:
    for of_rank in ranks.run(trained, world, runs):
        for run, got in zip(runs, of_rank, strict=True):
            want = plainly(run.family, run.skewed, run.dtype)
            assert got.keys() == want.keys()
            for name, gradient in want.items():
                error = (got[name] - gradient).norm() / gradient.norm().clamp_min(1e-12)
                assert error <= (1e-10 if run.dtype == torch.float64 else 2e-5), f"{run}, {name}: {error}"


@pytest.mark.parametrize("world", [1, slow(2), slow(3), slow(7)])
def test_families(world: int) -> None:
    """Five experts: of seven ranks some own none."""
    compare(world, [Run(family=name) for name in BUILD if name not in HYBRIDS or not lacking(name)])


STAGED = "experts=staged"
APART = [
    Run(family="Mixtral", backend="cpu-sharded"),
    Run(family="GptOss", backend="cpu-sharded", choice=STAGED),
    Run(family="Mixtral", backend="cpu-sharded", choice=STAGED, how={"expert_cache_bytes": MORE}),
    Run(family="Mixtral", backend="cpu-sharded", choice=STAGED, how={"expert_cache_bytes": FEW}, checkpointing=True),
    Run(family="Mixtral", backend="cpu-sharded", choice="experts=staged/whole", how={"expert_cache_bytes": LOTS}),
    Run(family="GptOss", backend="cpu-sharded", choice="experts=gathered/fused"),
    Run(family="Mixtral", backend="cpu-sharded", choice=STAGED, how={"expert_cache_bytes": LOTS}, skewed=True),
]
MORE_APART = [
    Run(family="Qwen3Moe", backend="cpu-sharded", choice=STAGED, how={"expert_cache_bytes": LOTS}),
    Run(family="GptOss", backend="cpu-sharded", choice=STAGED, how={"expert_cache_bytes": FEW}),
    Run(family="Mixtral", skewed=True),
]


@pytest.mark.parametrize(
    ("world", "runs"),
    [(2, APART), slow(2, MORE_APART), *(slow(world, APART + MORE_APART) for world in (3, 7))],
    ids=["2", "2, more", "3", "7"],
)
def test_where_shards_are_apart(world: int, runs: list[Run]) -> None:
    compare(world, runs)


KERNELS = {"backend": "cpu-interpreter", "dtype": torch.float32}
BY_KERNELS = [
    Run(family="GptOss", choice="experts=triton/direct/fused", how={"expert_cache_bytes": LOTS}, **KERNELS),
    Run(family="Mixtral", choice="experts=triton/direct/fused", how={"expert_cache_bytes": MORE // 2}, **KERNELS),
    Run(family="GptOss", choice="experts=triton/staged/fused", how={"expert_cache_bytes": FEW // 2}, **KERNELS),
    Run(family="Mixtral", choice="experts=triton/staged/whole", **KERNELS),
    Run(
        family="Mixtral",
        choice="experts=triton/staged/fused",
        how={"exact": True, "expert_cache_bytes": LOTS},
        **KERNELS,
    ),
]


@pytest.mark.slow
def test_by_kernels() -> None:
    compare(2, BY_KERNELS)


def test_an_expert_that_is_not_there() -> None:
    weight = nn.Parameter(torch.ones(2, 3, 4))
    with LocalShards(weight, 2), pytest.raises(IndexError, match=r"an expert outside of 0\.\.1, 1 times"):
        grouped_linear(torch.ones(2, 4), torch.tensor([0, 1, 1], dtype=torch.int32), weight)


@pytest.mark.parametrize("gate", [(), (2.0, 1.5, 1.0)])
def test_a_weight_that_is_never_whole_beside_a_bias_that_is_not_sharded(gate: tuple[float, ...]) -> None:
    """A frozen bias in `ignored_params`."""
    x, bias, whole = (
        torch.linspace(-1, 3, math.prod(size)).double().view(size) for size in ((3, 5), (2, 4), (2, 5, 4))
    )
    weight, offsets = nn.Parameter(whole.clone()), torch.tensor([0, 1, 3], dtype=torch.int32)
    y = torch.cat([x[:1] @ whole[0] + bias[0], x[1:] @ whole[1] + bias[1]])
    want = gated(y, gate) if gate else y
    with LocalShards(weight, 2):
        vars(weight)["_odc_never_whole"] = True
        weight.detach().fill_(math.nan)  # what has no memory must not be read
        torch.testing.assert_close(grouped_linear(x, offsets, weight, bias, transposed=True, gate=gate), want)


def moved(rank: int, world: int, cache_bytes: int) -> tuple[int, int, int]:
    """Rows that two equal microbatches copied here and added to peers, of how many that are not this rank's."""
    model = model_of(Run(family="Mixtral", dtype=torch.float32))
    replace_layers(model, roles=["experts"], choice=STAGED, verbose=False)
    model = fully_shard(model, backend="cpu-sharded", expert_cache_bytes=cache_bytes)
    of_experts = {each.number: each for each in engine_of(model).parameters if ".experts." in each.name}
    copied, added = [], []
    with pytest.MonkeyPatch.context() as patch:
        own, add = RowsOfOwners._copy, LockedTransport._add
        patch.setattr(RowsOfOwners, "_copy", lambda this, *given: copied.append(len(given[1])) or own(this, *given))

        def adding(this: Any, pending: dict[int, torch.Tensor], target: Any, *rest: Any) -> Any:
            theirs = target.number in of_experts
            added.extend(len(rows) for owner, rows in pending.items() if theirs and owner != rank)
            return add(this, pending, target, *rest)

        patch.setattr(LockedTransport, "_add", adding)
        with minibatch(model, tokens=27):
            for _ in range(2):
                _loss(model, BATCHES[3]).backward()
    others = sum(each.shape[0] - len(each.shard.compute_shards[rank]) for each in of_experts.values())
    return sum(copied), sum(added), others


def test_what_is_kept_moves_once() -> None:
    for kept, passing in zip(*(ranks.run(moved, 2, cache_bytes) for cache_bytes in (LOTS, 0)), strict=True):
        assert 0 < kept[0] == kept[1] <= kept[2]  # of those that are hit
        assert passing[:2] == (4 * kept[0], 2 * kept[0])


class Doubled(MixtralExperts):
    def forward(self, *given: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(*given)


def _derived(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.experts.__class__ = Doubled


LEFT = {
    "a subclass": (_derived, "a Doubled, not run by transformers' ExpertsInterface"),
    "its own function": (lambda model: setattr(model.config, "_experts_implementation", "mine"), "the function 'mine'"),
    "quantised": (lambda model: model.to(torch.float8_e4m3fn), "it is torch.float8_e4m3fn"),
}


@pytest.mark.parametrize("case", LEFT)
def test_what_is_left_alone(case: str) -> None:
    change, why = LEFT[case]
    model = causal_lm("Mixtral")
    change(model)
    replaced = replace_layers(model, roles=["experts"], verbose=False)
    assert not replaced.swapped["experts"]
    assert why in str(replaced)


def test_a_model_is_pickled() -> None:
    model = causal_lm("Mixtral")
    replace_layers(model, verbose=False)
    other = pickle.loads(pickle.dumps(model))
    assert isinstance(other.model.layers[0].mlp.experts, Experts)
    torch.testing.assert_close(other(BATCHES[0]).logits, model(BATCHES[0]).logits, rtol=0, atol=0)


def test_a_cache_that_nobody_reads() -> None:
    model = causal_lm("Mixtral")
    replace_layers(model, roles=["experts"], verbose=False)
    with pytest.raises(ValueError, match=r"layers.0.mlp.experts.gate_up_proj is read whole or where it is"):
        fully_shard(model, backend="cpu-sharded", expert_cache_bytes=LOTS)


@pytest.mark.parametrize(
    ("budget_bytes", "kept"),
    [
        (0, [(0, 0), (0, 0)]),
        (191, [(4, 0), (2, 0)]),  # of 320 for all copies
        (8 * 32 + 4 * 16, [(8, 0), (4, 0)]),
        (8 * 32 + 4 * 16 + 4 * 64, [(8, 4), (4, 0)]),
        (10**400, [(8, 8), (4, 0)]),
    ],
    ids=["none", "some copies", "all copies", "some sums", "all"],
)
def test_copies_come_before_sums(budget_bytes: int, kept: list[tuple[int, int]]) -> None:
    """Rows of 32 bytes with sums of 64, and frozen rows of 16."""
    assert rows_to_keep([8, 4], [(32, 64), (16, 0)], budget_bytes) == kept
    assert rows_to_keep([8, 4], [(32, 64), (24, 0)], budget_bytes) == [(0, 0), (0, 0)]  # not aligned for kernels
