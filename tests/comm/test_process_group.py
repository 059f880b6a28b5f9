"""Which GPU is whose and what a process group communicates by, however ranks are launched."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from odc_triton import fully_shard, minibatch
from odc_triton.base.errors import RanksDiffer
from odc_triton.comm.process_group import gpu_index, group_kinds, start_process_group
from odc_triton.jobs.launcher.launch import LocalRanks
from odc_triton.sharding.agree import default_mesh
from odc_triton.sharding.collect import refuse_unshardable
from tests.support import ranks
from tests.support.deadlines import LONG_S
from tests.support.refusals import caught

LATE_S = 3.0
A, B, C = "GPU-a", "GPU-b", "GPU-c"
TORCHRUN = {"RANK": "11", "LOCAL_RANK": "3", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}


@pytest.mark.parametrize(
    ("environment", "visible", "known", "index"),
    [
        ({}, 1, {}, 0),  # a notebook
        ({}, 8, {"current": 5}, 5),
        (TORCHRUN, 8, {}, 3),
        (TORCHRUN, 1, {}, 0),  # each process sees its own GPU only
        (TORCHRUN, 2, {}, 1),  # four ranks on each of two
        ({"RANK": "2", "WORLD_SIZE": "4"}, 1, {}, 0),  # Ray: masked, without LOCAL_RANK
        ({"RANK": "2", "WORLD_SIZE": "4"}, 4, {}, 2),
        (TORCHRUN, 8, {"current": 0}, 3),  # something asked CUDA: that is no choice
        (TORCHRUN, 8, {"current": 0, "has_group": True}, 0),
        (TORCHRUN, 8, {"current": 0, "bound": 4, "has_group": True}, 4),
    ],
)
def test_a_ranks_gpu(environment: dict[str, str], visible: int, known: dict[str, Any], index: int) -> None:
    assert gpu_index(environment, visible, **known) == index


def test_a_rank_that_sees_no_gpu() -> None:
    with pytest.raises(RuntimeError, match="CUDA_VISIBLE_DEVICES is ''"):
        gpu_index(TORCHRUN | {"CUDA_VISIBLE_DEVICES": ""}, 0)


@pytest.mark.parametrize(
    ("devices", "kinds"), [([None], "gloo"), ([A, B, C], "cpu:gloo,cuda:nccl"), ([A, B, B], "gloo")]
)
def test_nccl_only_where_all_gpus_differ(devices: list[str | None], kinds: str) -> None:
    assert group_kinds(devices) == kinds


def test_some_ranks_without_a_gpu() -> None:
    with pytest.raises(RanksDiffer, match=re.escape("ranks [1, 2] compute on the CPU")):
        group_kinds([A, None, None])


def _one_step() -> float:
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(5, 3), backend="cpu")
    with minibatch(model, tokens=1):
        (model(torch.ones(1, 5)).sum() / 2).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # DTensor's own all-reduce, over the group
    return float(norm.full_tensor())


def _launched() -> tuple[float, str, int, float]:
    for variable in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(variable)
    norm = _one_step()
    kinds, world = dist.get_backend(), dist.get_world_size()
    dist.destroy_process_group()
    again = _one_step()
    dist.destroy_process_group()
    return norm, kinds, world, again


def _forked(function: Callable) -> list[Any]:
    """As `launch(function, ranks=2)`, but its ranks need no import."""
    with LocalRanks(2, method="fork") as job:
        job.start()
        return job.run(function)


def test_ranks_without_a_process_group() -> None:
    for norm, kinds, world, again in ranks.in_own_process(_forked, _launched):
        assert (kinds, world) == ("gloo", 2)
        # Each of the weight's 15 and the bias' 3 gradients is 1.
        assert norm == again == pytest.approx(18**0.5, rel=1e-6)


def _one_without() -> str:
    gpu_id = None if os.environ["RANK"] == "0" else lambda: A  # which has been shown none
    return caught(lambda: start_process_group(timedelta(seconds=LONG_S), gpu_id))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a rank must see no GPU")
def test_a_rank_without_a_gpu_is_told_to_all() -> None:
    said, own = ranks.in_own_process(_forked, _one_without)
    assert own.startswith("RuntimeError: this rank sees no GPU")
    assert said.startswith("RanksDiffer: rank 1 has no device: RuntimeError: this rank sees no GPU")


def _one_late() -> str:
    if os.environ["RANK"] == "1":
        dist.init_process_group = lambda *_, **__: None
    return caught(lambda: start_process_group(timedelta(seconds=LATE_S)))


def test_a_rank_that_does_not_connect_is_named() -> None:
    said, _ = ranks.in_own_process(_forked, _one_late)
    text = r"DeadlineExceeded: rank 0 waited \d+\.\d s for ranks \[1\] to connect: the deadline has passed"
    assert re.fullmatch(text, said), said


def _users_group(rank: int, world: int) -> tuple[float, bool]:
    mesh = default_mesh(timedelta(seconds=LONG_S), "cpu")
    return _one_step(), mesh.get_group() is dist.group.WORLD


def test_a_users_process_group_is_taken_as_it_is() -> None:
    for norm, is_theirs in ranks.run(_users_group, 2):
        assert norm == pytest.approx(18**0.5, rel=1e-6)
        assert is_theirs


def test_a_model_on_a_gpu_and_a_mesh_on_the_cpu() -> None:
    with FakeTensorMode():
        weight = nn.Parameter(torch.empty(2, 2, device="cuda"))
    with pytest.raises(ValueError, match=r"w is on cuda:0: .* or 'cpu', where their shards are. Move the model"):
        refuse_unshardable("w", weight, "cpu")
