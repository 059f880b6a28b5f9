"""Split sequences on a GPU: segments on two or three ranks against unsplit samples on one."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.nn.functional as F

from tests.gpu.marks import MARKS, ONE_GPU, take_gpu
from tests.support import ranks
from tests.support.parity import whole_model_error
from tests.support.splitting import DEALS, Setup, build, gradients, packs_of, run, sharded, step_on

pytestmark = MARKS
NAMED_WITHIN_S = 10


@pytest.mark.parametrize("window", [None, 48])
@pytest.mark.parametrize(("queries", "keys"), [(1, 33), (64, 64), (31, 200), (200, 201)])
def test_the_queries_are_the_last_of_their_keys(queries: int, keys: int, window: int | None) -> None:
    """What `varlen_attn` must do with more keys than queries; all else here relies on it."""
    from odc_triton.packs.document_attention import AttentionTerms, varlen

    torch.manual_seed(0)
    shapes = [(queries, 4, 64), (keys, 2, 64), (keys, 2, 64)]
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes)
    terms = AttentionTerms(sliding_window=window)
    ends = [torch.tensor([0, n], dtype=torch.int32, device="cuda") for n in (queries, keys)]
    out = varlen(q, k, v, ends[0], queries, terms, ends_of_keys=ends[1], longest_keys=keys)
    mask = torch.ones(queries, keys, dtype=torch.bool, device="cuda").tril(keys - queries)
    if window is not None:
        mask = mask.triu(keys - queries + 1 - window)
    exact = [each.detach().float().requires_grad_() for each in (q, k, v)]
    heads_first = (each.transpose(0, 1)[None] for each in exact)
    want = F.scaled_dot_product_attention(*heads_first, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)
    seed = torch.randn_like(want)
    got = torch.autograd.grad(out, (q, k, v), seed.bfloat16())
    wanted = torch.autograd.grad(want, exact, seed.bfloat16().float())
    for name, one, other in zip(("out", "dq", "dk", "dv"), (out, *got), (want, *wanted), strict=True):
        # bf16 has 8 bits, and sums of some hundred products of it are rounded once.
        assert (one.float() - other).norm() <= 2e-2 * other.norm(), name


def _on_gpu(rank: int, world: int, setup: Setup, one_gpu: bool) -> tuple:
    take_gpu(rank, one_gpu=one_gpu)
    return run(rank, world, setup)


@pytest.mark.parametrize(
    "setup",
    [
        Setup(backend="cuda", deal="zigzag", steps=3),
        Setup(backend="cuda", deal="zigzag", family="Mistral", change="checkpointing"),
        Setup(backend="cuda", family="Gemma2"),
    ],
    ids=lambda setup: f"{setup.family}-{setup.deal}",
)
@ONE_GPU
def test_as_whole_samples(setup: Setup, one_gpu: bool) -> None:
    _, want, _ = _whole(setup)
    for losses, first, _ in ranks.run(_on_gpu, len(DEALS[setup.deal]), setup, one_gpu):
        assert losses
        for name, gradient in want.items():
            # fp32 sums in another order, on a device whose library picks other algorithms for other shapes.
            assert (first[name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-7, name


def _whole(setup: Setup) -> tuple[list[float], dict, dict]:
    """Unsplit samples on one rank, on the GPU."""
    (found,) = ranks.run(_on_gpu, 1, replace(setup, deal="whole"), True)
    return found


def test_bf16_is_as_good_as_on_whole_samples() -> None:
    """Against fp32, segments in bf16 may be 1.2 times as far off as unsplit samples in bf16."""
    exact = Setup(backend="cuda", family="Llama", scale=16, sizes=(("max_position_embeddings", 1024),))
    half = replace(exact, half=True)
    want = _whole(exact)[1]
    whole, segments = _whole(half)[1], ranks.run(_on_gpu, 2, half, False)[0][1]
    assert whole_model_error(segments, want) <= 1.2 * whole_model_error(whole, want)


def _without_host_waits(rank: int, world: int) -> dict[str, torch.Tensor]:
    from odc_triton import minibatch
    from odc_triton.balance import to_device
    from odc_triton.hf import summed_loss

    take_gpu(rank)
    setup = Setup(backend="cuda", family="Llama", half=True)
    model = sharded(setup, rank)
    given = packs_of(setup, rank)
    packs = [to_device(pack, "cuda") for pack in given]
    for number in range(2):  # libraries and kernels are loaded in the first one
        with minibatch(model, tokens=1, split=given.split):
            for pack in packs:
                torch.cuda.set_sync_debug_mode("error" if number else "default")
                try:
                    summed_loss(model, pack).backward()
                finally:
                    torch.cuda.set_sync_debug_mode("default")
    return gradients(model)


def test_the_host_never_waits_in_a_microbatch() -> None:
    for found in ranks.run(_without_host_waits, 2):
        assert all(each.isfinite().all() for each in found.values())


def _killed(rank: int, world: int, where: str, victim: int) -> tuple[str, float]:
    from odc_triton import enable_split, fully_shard
    from odc_triton.sequence.exchange import SequenceExchange

    take_gpu(rank)
    setup = Setup(backend="cuda", deal="two")
    model = fully_shard(build(setup, replaced=True), backend="cuda", timeout=timedelta(seconds=60))
    enable_split(model, tokens=48)
    step_on(model, setup, rank)
    model.zero_grad()
    if rank == victim:
        own = getattr(SequenceExchange, where)

        def dies(self: SequenceExchange, layer: int, *rest: object) -> object:
            if layer == 1:
                time.sleep(1.0)  # the other's device is waiting by then
                os.kill(os.getpid(), signal.SIGKILL)
            return own(self, layer, *rest)

        setattr(SequenceExchange, where, dies)
    start_s = time.monotonic()
    try:
        step_on(model, setup, rank)
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start_s
    return "nothing", 0.0


@pytest.mark.parametrize(("where", "victim"), [("publish", 0), ("add", 1)])
def test_a_rank_killed_while_a_device_waits_for_it(where: str, victim: int) -> None:
    with ranks.start(_killed, 2, where, victim) as job:
        (survivor,) = job.wait_for([1 - victim])
    said, took_s = survivor.value
    assert said.startswith("RankLost: "), said
    assert f"rank {victim} died" in said
    assert took_s < NAMED_WITHIN_S + 1
