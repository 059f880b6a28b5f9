"""Small models on packs that hold segments of samples, and the same samples whole by plain torch in one process."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch._dynamo
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from odc_triton import full_parameters, minibatch
from odc_triton.balance import PackedDataset, count_target_tokens, pack_collate, to_device
from odc_triton.engine.api import engine_of
from odc_triton.hf import enable_packing, summed_loss
from odc_triton.packs.enable import innermost
from odc_triton.plan.entries import Entry, Segment
from odc_triton.plan.plan import MinibatchPacks, Plan
from odc_triton.sequence.exchange import SequenceExchange
from tests.support.families import causal_lm
from tests.support.gradients import gradients_of as gradients
from tests.support.hybrids import HYBRIDS, hybrid
from tests.support.parity import REPLACING, TRANSFORMS
from tests.support.replicas import mesh_of

LENGTHS = (41, 17, 30, 9)
IGNORED = -100
Dealt = list[list[list[Entry]]]

P = Segment
DEALS: dict[str, Dealt] = {
    # One sequence over two ranks, a rider, and a whole sample after the wave.
    "two": [[[P(0, 0, 24), 3], [1]], [[P(0, 24, 41)], [2]]],
    "one token first": [[[P(0, 0, 1)]], [[P(0, 1, 41), 1, 2, 3]]],
    "one token last": [[[P(0, 0, 40), 1]], [[P(0, 40, 41)], [2, 3]]],
    # Two sequences in one wave, several segments of one on a rank (in both orders), then a wave of another two ranks.
    "zigzag": [
        [[P(0, 0, 8), P(0, 30, 41), P(2, 20, 30)], [P(1, 9, 17)]],
        [[P(0, 8, 20), 3], [P(1, 0, 9)]],
        [[P(2, 0, 20), P(0, 20, 30)]],
    ],
    # The last rank has whole samples only; one before it has none.
    "whole": [[[0], [1], [2], [3]]],
    "no segments": [[[0, 3], [1]], [[2]]],
    # Replicas of two or three ranks: all have segments, some in two waves; or one of them has none.
    "2x2": [[[P(0, 0, 24), 3]], [[P(0, 24, 41)]], [[P(2, 0, 11)], [1]], [[P(2, 11, 30)]]],
    "3x2": [
        [[P(0, 0, 20)], [P(3, 4, 9)]],
        [[P(0, 20, 41)], [P(3, 0, 4)]],
        [[1]],
        [],
        [[P(2, 0, 20)]],
        [[P(2, 20, 30)]],
    ],
    "2x3": [[[P(0, 0, 8), P(0, 30, 41)]], [[P(0, 8, 20), 3]], [[P(0, 20, 30)]], [[P(2, 0, 9)]], [[P(2, 9, 30)]], [[1]]],
    # Samples that begin with the same 8 tokens: those of one on another rank; cut over two, with branches on three.
    "tree": [[[P(0, 0, 41), P(1, 7, 17, 0)]], [[P(2, 7, 30, 0), P(3, 7, 9, 0)]]],
    "cut tree": [[[P(0, 0, 5), P(1, 7, 17, 0)]], [[P(0, 5, 41), P(2, 7, 20, 0)]], [[P(2, 20, 30), P(3, 7, 9, 0)]]],
    "tree waves": [[[P(0, 0, 5)], [P(3, 7, 9, 2)]], [[P(0, 5, 41)], [P(2, 0, 20)]], [[P(1, 7, 17, 0)], [P(2, 20, 30)]]],
    "four": [[[P(2, 0, 10)]], [[P(2, 10, 22), P(0, 0, 13)]], [[P(2, 22, 30), P(0, 13, 41)]], [[1], [3]]],
}

# Two of LENGTHS are beyond the original length, and some of their segments are not.
_LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0, 4.0, 8.0, 16.0], "factor": 4.0}
ROPES: dict[str, dict[str, object]] = {
    "longrope": {
        "rope_parameters": {**_LONG, "rope_theta": 1e4, "original_max_position_embeddings": 24},
        "original_max_position_embeddings": 24,
    },
    "dynamic": {
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
        "max_position_embeddings": 24,
    },
}


@dataclass(frozen=True, kw_only=True)
class Setup:
    """`change`: names in TRANSFORMS, joined by +; `empty_start`: samples begin with tokens not learned; `prefix`: so
    many with which all begin; `replicas`: of equally many ranks each; `half`: computes in bf16; `scale`: samples and
    segments are this many times as long; `compiler`: of the blocks, but for the plain model, before all else;
    `in_flight`: layers that have buffers at a time; `run_tokens`: that attention reads of others at once;
    `rope`: of ROPES; `groups`: (sample, group).
    """

    family: str = "Qwen2"
    deal: str = "two"
    backend: str = "cpu"
    dtype: torch.dtype = torch.float32
    change: str = "none"
    steps: int = 1
    empty_start: bool = False
    prefix: int = 0
    sizes: tuple[tuple[str, object], ...] = ()
    half: bool = False
    scale: int = 1
    replicas: int = 1
    compiler: str = ""
    in_flight: int | None = None
    run_tokens: int = 65_536
    rope: str = ""
    groups: tuple[tuple[int, int], ...] = ()


def build(setup: Setup, *, replaced: bool) -> nn.Module:
    """On packed attention; `replaced`: with our layers too, where the setup has them."""
    torch.manual_seed(0)
    if setup.family in HYBRIDS:
        model = hybrid(setup.family, dtype=setup.dtype)
    else:
        model = causal_lm(setup.family, **dict(setup.sizes), **ROPES.get(setup.rope, {})).to(setup.dtype)
    for change in setup.change.split("+"):
        if replaced or change not in REPLACING:
            model = TRANSFORMS[change](model)
    if replaced and setup.compiler:
        torch._dynamo.reset()
        for layer in innermost(model).model.layers:
            layer.compile(backend=setup.compiler)
    enable_packing(model)
    return model


def samples(setup: Setup, step: int = 0) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(step)
    made = []
    for length in (each * setup.scale for each in LENGTHS):
        ids = torch.randint(3, 97, (length,), generator=generator)
        labels = ids.clone()
        if setup.empty_start:
            labels[: 3 * length // 4] = IGNORED
        same = setup.prefix * setup.scale
        ids[:same], labels[:same] = torch.arange(3, 3 + same), IGNORED
        made.append({"input_ids": ids, "labels": labels})
    return made


def packs_of(setup: Setup, rank: int, step: int = 0, deal: Dealt | None = None) -> MinibatchPacks:
    deal = [
        [[_longer(entry, setup.scale) for entry in pack] for pack in packs]
        for packs in (DEALS[setup.deal] if deal is None else deal)
    ]
    packs = Plan.by_hand(deal, replicas=setup.replicas, groups=dict(setup.groups)).packs(rank)
    return pack_collate(PackedDataset(samples(setup, step)).__getitems__(packs))


def _longer(entry: Entry, scale: int) -> Entry:
    if not isinstance(entry, Segment):
        return entry
    return Segment(entry.sample, entry.start * scale, entry.stop * scale, entry.parent)


def sharded(setup: Setup, rank: int, tokens: int = 48) -> nn.Module:
    from odc_triton import enable_split, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if setup.half else None
    mesh = None
    if setup.replicas > 1:
        mesh = mesh_of((setup.replicas, len(DEALS[setup.deal]) // setup.replicas))
    model = fully_shard(build(setup, replaced=True), backend=setup.backend, mp_policy=policy, mesh=mesh)
    enable_split(model, tokens=tokens * setup.scale, layers_in_flight=setup.in_flight)
    engine_of(model).participant(SequenceExchange).run_tokens = setup.run_tokens
    return model


def raises_in_forward(model: nn.Module, pack: dict) -> torch.Tensor:
    def go_wrong(module: nn.Module, given: tuple, output: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("no memory for 3 GiB")

    with model.model.layers[1].mlp.register_forward_hook(go_wrong):
        return summed_loss(model, pack)


def step_on(
    model: nn.Module, setup: Setup, rank: int, step: int = 0, loss_of: Callable | None = None, deal: Dealt | None = None
) -> tuple[float, dict[str, torch.Tensor]]:
    """One minibatch: this rank's part of the loss, and the gradients of all."""
    packs, total = packs_of(setup, rank, step, deal), 0.0
    device = next(model.parameters()).device
    with minibatch(model, tokens=count_target_tokens(packs), split=packs.split) as mb:
        for pack in (to_device(each, device) for each in packs):
            loss = (loss_of or summed_loss)(model, pack) / mb.tokens
            loss.backward()
            total += loss.item()
    return total, gradients(model)


def run(rank: int, world: int, setup: Setup) -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """This rank's losses by step, the first step's gradients, the weights at the end."""
    model = sharded(setup, rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, first = [], {}
    for step in range(setup.steps):
        loss, found = step_on(model, setup, rank, step)
        first = first or found
        losses.append(loss)
        optimizer.step()
        optimizer.zero_grad()
    return losses, first, dict(full_parameters(model))


@functools.cache
def plain(setup: Setup) -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The same on unsplit samples, one after another, by plain torch."""
    torch.set_num_threads(1)
    model = build(setup, replaced=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, first = [], {}
    for step in range(setup.steps):
        packs = pack_collate([[each] for each in samples(setup, step)])
        tokens, total = count_target_tokens(packs), 0.0
        for pack in packs:
            loss = summed_loss(model, pack) / tokens
            loss.backward()
            total += loss.item()
        first = first or copy.deepcopy(gradients(model))
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return losses, first, {name: p.detach().clone() for name, p in model.named_parameters()}


def require_plain(found: dict[str, torch.Tensor], setup: Setup, tolerance: float = 1e-5) -> None:
    """The gradients of unsplit samples, but for fp32 sums in another order."""
    want = plain(setup)[1]
    assert found.keys() == want.keys()
    for name, gradient in want.items():
        assert (found[name] - gradient).norm() <= tolerance * gradient.norm() + 1e-2 * tolerance, name
