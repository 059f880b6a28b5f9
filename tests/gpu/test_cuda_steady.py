"""The steady state on a GPU: no host waits inside a microbatch, whichever stream is current."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn

from odc_triton.comm.process_group import rendezvous_url
from odc_triton.jobs.launcher.launch import launch
from tests.engine.test_host_waits import _PACKS, LAYERS, _packs
from tests.gpu.launched import Blocks, launched, one_step
from tests.gpu.marks import MARKS, take_gpu
from tests.support import ranks
from tests.support.models import build
from tests.support.parity import TRANSFORMS

pytestmark = MARKS


@contextmanager
def _waiting_raises() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _without_waiting(rank: int, world: int, name: str, roles: tuple[str, ...], change: str, choice: str) -> float:
    from odc_triton import MixedPrecisionPolicy, fully_shard, minibatch
    from odc_triton.hf import enable_packing, summed_loss
    from odc_triton.nn.replace import replace_layers
    from odc_triton.packs.collate import count_target_tokens, to_device

    take_gpu(rank)
    model = build(name)
    enable_packing(model)
    if roles:
        replace_layers(model, roles=roles, choice=choice, verbose=False)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)  # the attention kernel that needs no bounds on the host
    model = fully_shard(TRANSFORMS[change](model), backend="cuda", mp_policy=policy)
    packs = _packs(_PACKS)
    loss = torch.zeros((), device="cuda")
    # The first minibatch compiles kernels and makes their tables of addresses.
    for step in range(2):
        with minibatch(model, tokens=count_target_tokens(packs)) as mb:
            here = [to_device(pack, "cuda") for pack in packs]
            for pack in here:
                if step == 0:
                    (summed_loss(model, pack) / mb.tokens).backward()
                    continue
                with _waiting_raises():
                    mine = summed_loss(model, pack) / mb.tokens
                    mine.backward()
                    loss += mine.detach()
        model.zero_grad()
    return loss.item()


@pytest.mark.parametrize(
    ("name", "roles", "change", "choice"),
    [
        ("Qwen2", (), "none", "auto"),
        ("Gemma3", (), "checkpointing", "auto"),
        ("Qwen2", LAYERS, "none", "auto"),
        ("Qwen2", LAYERS, "none", "qkv=triton/gathered"),
        ("Llama", (*LAYERS, "head"), "checkpointing", "auto"),
        ("Qwen3Moe", ("experts",), "none", "experts=triton/direct/fused"),
        ("GptOss", ("experts",), "checkpointing", "experts=triton/staged/fused"),
    ],
)
def test_no_host_waits(name: str, roles: tuple[str, ...], change: str, choice: str) -> None:
    for loss in ranks.run(_without_waiting, 2, name, roles, change, choice):
        assert loss > 0


def test_waiting_raises() -> None:
    with _waiting_raises(), pytest.raises(RuntimeError, match="synchroniz"):
        torch.ones(3, device="cuda").nonzero()


def _gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.to_local().clone() for name, parameter in model.named_parameters()}


def _on_other_streams(rank: int, world: int) -> float:
    """The largest relative difference that microbatches on streams of their own make."""
    from odc_triton import fully_shard, minibatch

    take_gpu(rank)
    model = fully_shard(Blocks(), backend="cuda")
    x = torch.randn(64, 512, device="cuda", generator=torch.Generator("cuda").manual_seed(rank))
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    results = []
    for aside in (False, True):
        with minibatch(model, tokens=world):
            for index in range(4):
                with torch.cuda.stream(streams[index % 2] if aside else torch.cuda.current_stream()):
                    model(x * (index + 1)).square().mean().backward()
        results.append(_gradients(model))  # nothing but the minibatch's end has waited for those streams
        model.zero_grad()
    want, got = results
    return max(((got[name] - want[name]).norm() / want[name].norm()).item() for name in want)


@pytest.mark.parametrize("world", [1, 2])
def test_microbatches_on_streams_of_their_own(world: int) -> None:
    for difference in ranks.run(_on_other_streams, world):
        assert difference < 1e-5  # fp32 sums in another order


def _norm() -> float:
    plain = Blocks(64).cuda()
    plain(torch.ones(4, 64, device="cuda")).square().mean().backward()
    return nn.utils.clip_grad_norm_(plain.parameters(), 1.0).item()


def _by_nccl_only() -> tuple[str, float]:
    """A user's own group, of which nothing on the CPU can be asked."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", rendezvous_url())
    try:
        kinds, _, norm = one_step()
    finally:
        dist.destroy_process_group()
    return kinds, norm


def test_a_users_group_of_nccl_alone() -> None:
    found = launch(_by_nccl_only, ranks=min(2, torch.cuda.device_count()))
    want = _norm()
    for kinds, norm in found:
        assert "gloo" not in kinds
        assert norm == pytest.approx(want, rel=1e-4)  # fp32 sums in another order


def test_a_model_on_a_gpu_and_a_mesh_on_the_cpu() -> None:
    from odc_triton import fully_shard

    with pytest.raises(ValueError, match=r"is on cuda:0: models are sharded from the CPU, the meta device or 'cpu'"):
        fully_shard(nn.Linear(2, 2).cuda(), backend="cpu")


@pytest.mark.parametrize("masked", [False, True])
def test_launched_without_a_process_group(masked: bool) -> None:
    gpus = torch.cuda.device_count()
    found = launch(launched, gpus, masked, ranks=2)
    want = _norm()
    for rank, (kinds, index, norm) in enumerate(found):
        assert ("nccl" in kinds) == (gpus >= 2)
        assert index == (0 if masked else rank % gpus)
        assert norm == pytest.approx(want, rel=1e-4)  # fp32 sums in another order
