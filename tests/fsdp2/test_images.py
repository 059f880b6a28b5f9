"""Why pictures need more than FSDP2: where only some ranks' batches have any, it does not go on, and ours does."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from odc_triton import fully_shard, minibatch, use_odc
from odc_triton.comm.layout import find_units
from odc_triton.hf import enable_packing
from tests.hf.test_images import CHANGES, one_process, trained
from tests.support import ranks
from tests.support.deadlines import LONG_S, SHORT_S
from tests.support.splitting import gradients
from tests.support.vision import FAMILIES, alone

MIXED, EVEN = (2, 0), (2, 1)  # pictures of each rank's sample


def loss_of(model: nn.Module, family: str, pictures: tuple[int, int], rank: int) -> torch.Tensor:
    """Summed over the targets of the rank's sample, which are as many on each rank."""
    sample = FAMILIES[family].sample(9, pictures[rank], seed=rank)
    return F.cross_entropy(alone(model, sample)[:-1], torch.tensor(sample["labels"])[1:], reduction="sum")


def by_fsdp2(family: str, seconds: float, groups: int) -> nn.Module:
    """As torch shards it, vision blocks too, with a deadline. `groups`: 2 if the tower's units have their own."""
    made = [dist.new_group(timeout=timedelta(seconds=seconds)) for _ in range(groups)]
    text, tower = (DeviceMesh.from_group(each, "cpu", mesh=[0, 1]) for each in (made[0], made[-1]))
    model = FAMILIES[family].model(dtype=torch.float64)
    for name in find_units(model):
        torch_fully_shard(model.get_submodule(name), mesh=tower if "vis" in name else text)
    return torch_fully_shard(model, mesh=text)


def by_torch(rank: int, world: int, family: str, groups: int) -> dict[str, torch.Tensor]:
    """Raises RuntimeError at the deadline, with pictures on rank 0 only; before that, with pictures on both, none."""
    loss_of(by_fsdp2(family, LONG_S, groups), family, EVEN, rank).backward()
    model = by_fsdp2(family, SHORT_S, groups)
    dist.barrier()
    loss_of(model, family, MIXED, rank).backward()
    return gradients(model)


def by_odc(rank: int, world: int, family: str, bridged: bool) -> dict[str, torch.Tensor]:
    if bridged:
        model = use_odc(by_fsdp2(family, LONG_S, 1))
    else:
        model = fully_shard(FAMILIES[family].model(dtype=torch.float64))
    with minibatch(model, tokens=1):
        loss_of(model, family, MIXED, rank).backward()
    return gradients(model)


@pytest.mark.parametrize("family", ["qwen2_5_vl", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_fsdp2_hangs_where_only_one_rank_has_pictures(family: str) -> None:
    """Rank 0 waits in its tower, rank 1 in the text's layers, each for the other."""
    with ranks.start(by_torch, 2, family, 2) as job:
        errors = [outcome.error or "" for outcome in job.join()]
    assert any("Timed out waiting" in error for error in errors), errors


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
def test_gloo_aborts_by_the_sizes_of_units(family: str) -> None:
    """In one process group the ranks' n-th collectives are of different units. NCCL does not compare sizes."""
    with ranks.start(by_torch, 2, family, 1) as job:
        ends = [(outcome.signal, outcome.error) for outcome in job.join()]
    assert all(any(end) for end in ends), ends


@pytest.mark.parametrize("family", ["qwen2_5_vl", pytest.param("gemma3", marks=pytest.mark.slow)])
@pytest.mark.parametrize("bridged", [False, True])
def test_the_same_batches_have_the_gradients_of_one_process(family: str, bridged: bool) -> None:
    model = FAMILIES[family].model(dtype=torch.float64)
    for rank in range(2):
        loss_of(model, family, MIXED, rank).backward()
    wanted = gradients(model)
    for found in ranks.run(by_odc, 2, family, bridged):
        assert found.keys() == wanted.keys()
        for name, each in wanted.items():
            assert torch.allclose(found[name], each, rtol=0, atol=1e-10), name


def _packs(rank: int, world: int, family: str, change: str, backend: str) -> dict[str, torch.Tensor]:
    model = FAMILIES[family].model(dtype=torch.float64)
    enable_packing(model)
    model = CHANGES[change](model).train()
    for name in find_units(model):
        torch_fully_shard(model.get_submodule(name))
    return trained(use_odc(torch_fully_shard(model), backend=backend), rank, world, family)


@pytest.mark.slow
@pytest.mark.parametrize("change", ["none", "frozen tower", "LoRA", "checkpointing"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packs_under_use_odc(family: str, change: str) -> None:
    """One of three ranks has no microbatch, and two have pictures."""
    wanted = one_process(family, change, torch.float64)
    for backend in ("cpu", "cpu-sharded"):
        for found in ranks.run(_packs, 3, family, change, backend):
            assert found.keys() == wanted.keys()
            for name, each in wanted.items():
                assert torch.allclose(found[name], each, rtol=0, atol=1e-10), name
