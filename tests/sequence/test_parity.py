"""Samples that are split over ranks give the loss, gradients and steps of the unsplit samples by plain torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention import varlen

from odc_triton import minibatch
from odc_triton.comm.barrier import Barrier
from odc_triton.hf import summed_loss
from odc_triton.packs.document_attention import AttentionTerms
from odc_triton.sequence import flash
from odc_triton.sequence.sync import HostSync, Wait
from tests.support import ranks
from tests.support.flash import Flash
from tests.support.parity import relative, whole_model_error
from tests.support.splitting import DEALS, Setup, packs_of, plain, run, sharded
from tests.support.varlen import Varlen

FP64 = torch.float64
# A part computes in fp32 whatever the weights are: the softmax under a softcap. (Mixtures of experts have no fp64.)
IN_FP32 = ("Gemma2",)
# Attention reads five tokens of others at once.
REUSED = Setup(
    deal="zigzag", change="checkpointing", sizes=(("num_hidden_layers", 5),), in_flight=1, run_tokens=5, steps=2
)


def compare(*setups: Setup) -> None:
    """Setups of as many ranks run in one launch of them."""
    by_world: dict[int, list[Setup]] = {}
    for setup in setups:
        by_world.setdefault(len(DEALS[setup.deal]), []).append(setup)
    for world, alike in by_world.items():
        for setup, outcomes in zip(alike, ranks.run_all(world, *((run, setup) for setup in alike)), strict=True):
            assert_alike(setup, outcomes)


def assert_alike(setup: Setup, outcomes: list[tuple]) -> None:
    # The plain model is the same however samples are dealt.
    want_losses, want, want_weights = plain(replace(setup, deal="two", backend="cpu", replicas=1, compiler=""))
    # fp32: sums in another order. fp64: rounding alone; the loss is computed in fp32.
    tolerance = 1e-5 if setup.dtype != FP64 else 1e-6 if setup.family in IN_FP32 else 1e-12
    for step, loss in enumerate(want_losses):
        assert sum(losses[step] for losses, _, _ in outcomes) == pytest.approx(loss, rel=1e-5), setup
    largest = max(gradient.norm() for gradient in want.values())
    for _, first, weights in outcomes:
        assert first.keys() == want.keys(), setup
        for name, gradient in want.items():
            # Biases of keys have a small gradient beside its summands; what is zero but for rounding has no digits.
            floor = 1e-3 * tolerance * largest
            off = first[name] - gradient
            assert off.norm() <= tolerance * gradient.norm() + floor, (setup, name)
            assert off.abs().max() <= tolerance / 2 * gradient.abs().max() + floor, (setup, name)
        if setup.steps > 1:
            assert whole_model_error(weights, want_weights) <= 1e-4
            moved = {name: weight for name, weight in want_weights.items() if name in want}
            assert max(relative(weights[name], weight) for name, weight in moved.items()) <= 1e-2


def test_as_whole_samples() -> None:
    compare(
        Setup(deal="zigzag", steps=3),
        Setup(deal="one token first", dtype=FP64),
        Setup(family="Qwen3", change="reentrant", empty_start=True),
        # Its layers get the segments with the position ids.
        Setup(family="StableLm", dtype=FP64, change="checkpointing"),
        Setup(family="DeepseekV3", deal="zigzag"),  # experts, and keys wider than values
        Setup(deal="no segments"),
        Setup(family="Qwen3", change="layers", deal="zigzag", backend="cpu-sharded"),
        Setup(family="Mistral", deal="zigzag", backend="cpu-interpreter", change="checkpointing"),
        # Layers take turns in buffers.
        replace(REUSED, dtype=FP64, in_flight=2),
        replace(REUSED, family="GptOss", backend="cpu-sharded", deal="cut tree", prefix=8, change="reentrant"),
        replace(REUSED, family="Llama", deal="tree waves", prefix=8, change="lora+checkpointing"),
        # A segment has the rotary frequencies of its whole sample.
        Setup(family="Phi3", rope="longrope", deal="zigzag", dtype=FP64),
    )


def _by_kernels(rank: int, world: int, setup: Setup) -> tuple[dict[str, torch.Tensor], list[int], int]:
    """The first step's gradients; the longest document of each call of `varlen_attn`; FlashAttention's other calls."""
    varlen.varlen_attn = whole = Varlen()
    parts = Flash()
    AttentionTerms.fit_kernel = lambda *_: True
    flash._forward, flash._backward = parts.forward, parts.backward
    _, found, _ = run(rank, world, setup)
    longest = [longest for longest, _ in whole.calls if longest > 12]  # the probes have documents of 12 at most
    return found, longest, len(parts.calls)


def _as_on_a_gpu(setup: Setup) -> tuple[list[list[int]], list[int]]:
    _, want, _ = plain(replace(setup, deal="two", backend="cpu"))
    founds, longest, calls = zip(*ranks.run(_by_kernels, len(DEALS[setup.deal]), setup), strict=True)
    largest = max(gradient.norm() for gradient in want.values())
    for found in founds:
        for name, gradient in want.items():
            assert (found[name] - gradient).norm() <= 1e-12 * gradient.norm() + 1e-15 * largest, name
    return [*longest], [*calls]


def test_whole_documents_beside_a_segment_are_one_call_of_the_kernel() -> None:
    """In two layers, forward and backward."""
    setup = Setup(family="Mistral", deal="one token first", backend="cpu-sharded", dtype=FP64)
    assert _as_on_a_gpu(setup)[0] == [[], [40, 30] * 4]


def test_by_flash_attention_what_was_fetched_is_freed_and_filled_again() -> None:
    _, calls = _as_on_a_gpu(Setup(deal="zigzag", backend="cpu-sharded", dtype=FP64))
    assert min(calls) > 0


BACKENDS = ("cpu", "cpu-sharded", "cpu-interpreter")
FAMILIES = ("Qwen2", "Llama", "Qwen3", "Mistral", "Gemma2", "GptOss", "Qwen3Moe", "Mixtral", "DeepseekV3")
CHANGES = ("checkpointing", "reentrant", "lora+checkpointing", "frozen", "layers", "head", "reentrant+chunks")
SLOW = {
    "families": [Setup(family=family, deal="four", backend=BACKENDS[at % 3]) for at, family in enumerate(FAMILIES)],
    "deals": [
        Setup(deal=deal, backend="cpu-sharded", prefix=8) for deal in ("one token last", "whole", "tree", "cut tree")
    ],
    "changes": [
        Setup(family="Mistral", deal="zigzag", backend=BACKENDS[at % 3], change=change, empty_start=True)
        for at, change in enumerate(CHANGES)
    ],
    "reused": [
        *(replace(REUSED, family=family, backend="cpu-sharded") for family in ("Gemma2", "DeepseekV3")),
        replace(REUSED, deal="cut tree", backend="cpu-interpreter", prefix=8),
        replace(REUSED, deal="2x2", replicas=2, backend="cpu-sharded", in_flight=2),
    ],
    "compiled": [
        Setup(compiler="inductor", steps=2),
        Setup(family="Llama", compiler="aot_eager", change="lora"),
        Setup(family="Qwen3", compiler="aot_eager", change="layers", backend="cpu-sharded"),
        Setup(family="StableLm", deal="cut tree", prefix=8, compiler="aot_eager", change="checkpointing"),
    ],
    "rope": [
        Setup(family="Llama", rope="dynamic", deal="zigzag", dtype=FP64, change="checkpointing"),
        Setup(family="Qwen2", rope="dynamic", deal="2x2", replicas=2, backend="cpu-sharded", change="lora"),
        Setup(family="Phi3", rope="longrope", deal="zigzag", compiler="aot_eager", change="reentrant"),
        Setup(family="Nemotron", rope="dynamic", deal="four", dtype=FP64),
    ],
    "more": [
        Setup(deal="zigzag", backend="cpu-sharded", steps=20),
        Setup(family="Nemotron", deal="cut tree", prefix=8, backend="cpu-sharded", change="reentrant"),
        Setup(family="GptOss", deal="tree", prefix=8, backend="cpu-sharded"),
        Setup(family="Llama", deal="2x3", replicas=2, change="lora"),
        Setup(family="Qwen3Moe", deal="3x2", replicas=3, backend="cpu-sharded"),
        Setup(family="GptOss", deal="zigzag", backend="cpu-sharded", change="experts", steps=3),
        Setup(family="Qwen3Moe", deal="cut tree", prefix=8, backend="cpu-sharded", change="checkpointing+experts"),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("setups", SLOW.values(), ids=SLOW)
def test_every_family_and_change(setups: list[Setup]) -> None:
    compare(*setups)


def test_bf16_is_as_good_as_on_whole_samples() -> None:
    """Against fp32, segments in bf16 may be 1.2 times as far off as unsplit samples in bf16."""
    exact = Setup(family="Llama", scale=4)
    half = replace(exact, half=True)
    want = plain(exact)[1]
    ((_, whole, _),) = ranks.run(run, 1, replace(half, deal="whole"))
    (_, segments, _), _ = ranks.run(run, 2, half)
    assert 1e-3 < whole_model_error(segments, want) <= 1.2 * whole_model_error(whole, want)


def _watched(rank: int, world: int, setup: Setup) -> tuple[list[str], int, int]:
    """What this rank looked at flags for, by purpose; its store operations, and collectives, inside microbatches."""
    model, purposes, stored, grouped = sharded(setup, rank), [], [], []
    own = HostSync.wait

    def waits(self: HostSync, wait: Wait) -> None:
        purposes.extend(wait.whom.values())
        own(self, wait)

    def loss_of(model: torch.nn.Module, pack: dict) -> torch.Tensor:
        """From here to the end of its backward is a microbatch."""
        Barrier.post = lambda *given: stored.append(given)
        dist.distributed_c10d.ProcessGroup.allreduce = lambda *given: grouped.append(given)
        return summed_loss(model, pack)

    post, allreduce = Barrier.post, dist.distributed_c10d.ProcessGroup.allreduce
    HostSync.wait = waits
    with minibatch(model, tokens=1, split=(packs := packs_of(setup, rank)).split):
        for pack in packs:
            loss_of(model, pack).backward()
        Barrier.post, dist.distributed_c10d.ProcessGroup.allreduce = post, allreduce
    return purposes, len(stored), len(grouped)


def test_who_looks_at_flags_and_that_nobody_asks_the_store() -> None:
    """Sample 2 over ranks 0, 1, 2, sample 0 over ranks 1, 2; rank 3 has unsplit samples only."""
    outcomes = ranks.run(_watched, 4, Setup(deal="four"))
    assert [(stored, grouped) for _, stored, grouped in outcomes] == [(0, 0)] * 4
    first, second, last, without = (set(purposes) for purposes, _, _ in outcomes)
    assert without == set()
    assert all(purpose.startswith("gradients of tokens 0..9 of sample 2 from") for purpose in first)
    assert len(first) == 2 * 2  # two readers, two layers
    assert any(purpose.startswith("keys and values of tokens 0..9 of sample 2") for purpose in second)
    assert all(purpose.startswith("keys and values") for purpose in last), "nobody reads a last segment"
