"""Several replicas of ranks that share memory: gradients summed and parameters exchanged over a process group."""

from __future__ import annotations

import copy
import math
import os
import signal
import time
from unittest import mock

import pytest
import torch

from odc_triton import MinibatchFailed, MixedPrecisionPolicy, OdcError, full_parameters, fully_shard, minibatch
from odc_triton.comm import replicas
from odc_triton.tools.memory.footprint import memory_plan
from tests.support import ranks
from tests.support.deadlines import LONG_S
from tests.support.gradients import gradients_of
from tests.support.models import CASES, build, microbatches
from tests.support.parity import compare_each, relative
from tests.support.replicas import Rows, mesh_of

BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("shape", "name", "backend", "style", "steps"),
    [
        ((2, 2), "conv", "cpu", "root", 6),  # of which rank 1 evaluates after the fifth
        ((2, 2), "qwen2", "cpu-sharded", "bottom-up", 3),
        ((3, 1), "conv", "cpu-sharded", "root", 3),
    ],
)
def test_against_one_process(shape: tuple[int, int], name: str, backend: str, style: str, steps: int) -> None:
    """Uneven counts, a rank without microbatches; in "conv" a scalar, an empty parameter and rows fewer than ranks."""
    compare_each([(name, "none")], math.prod(shape), style=style, backend=backend, steps=steps, shape=shape)


@pytest.fixture(scope="module")
def in_ranks() -> dict[str, list]:
    """What each call returned on four ranks in two replicas."""
    calls = {"masters": _masters, "rows": _rows, "raising": _raising}
    return dict(zip(calls, ranks.run_all(4, *calls.values()), strict=True))


def _masters(rank: int, world: int) -> tuple[int, int]:
    """Elements of this rank's masters, bytes of its optimizer's state."""
    model = fully_shard(build("conv"), mesh=mesh_of((2, 2)))
    optimizer = torch.optim.AdamW(model.parameters())
    with minibatch(model):
        CASES["conv"].loss(model, microbatches("conv", [3], seed=0)[0]).backward()
    optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values()]
    state_bytes = sum(getattr(value, "_local_tensor", value).nbytes for value in states)
    return sum(p.to_local().numel() for p in model.parameters()), state_bytes


def test_masters_are_on_all_ranks_each_element_once(in_ranks: dict[str, list]) -> None:
    masters = in_ranks["masters"]
    assert sum(elements for elements, _ in masters) == sum(p.numel() for p in build("conv").parameters())
    assert masters[0][1] == memory_plan(build("conv"), 2, replicas=2).optimizer_state_bytes


@mock.patch.object(replicas, "_BUFFER_BYTES", 48)  # parts are cut to fit it
def _rows(rank: int, world: int) -> tuple:
    torch.manual_seed(0)
    with torch.device("meta" if rank else "cpu"):  # rank 0's values count
        model = Rows()
    model = fully_shard(
        model, mesh=mesh_of((2, 2)), mp_policy=MixedPrecisionPolicy(param_dtype=BF16), backend="cpu-sharded"
    )
    start = dict(full_parameters(model))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))
    gradients = {}
    for _ in range(2):
        with minibatch(model, tokens=1):
            model(x.to(BF16)).backward()
        gradients = gradients_of(model)
        optimizer.step()
    rows = {key: len(p.to_local()) if p.dim() else None for key, p in model.named_parameters()}
    return start, gradients, dict(full_parameters(model)), rows, model.state_dict()["offset"]


def test_odd_rows(in_ranks: dict[str, list]) -> None:
    results = in_ranks["rows"]
    torch.manual_seed(0)
    master = Rows()
    model = copy.deepcopy(master).to(BF16)
    assert all(torch.equal(value, model.get_parameter(key)) for key, value in results[0][0].items())
    gradients: dict[str, torch.Tensor] = {}
    for _ in range(2):
        model.zero_grad()
        sums = {key: torch.zeros_like(p) for key, p in master.named_parameters()}
        for rank in range(4):
            model.zero_grad()
            model(torch.randn(3, 4, generator=torch.Generator().manual_seed(rank)).to(BF16)).backward()
            for key, p in model.named_parameters():
                if p.grad is not None:
                    sums[key] += p.grad.float()
        used = [key for key, p in model.named_parameters() if p.grad is not None]
        gradients = {key: sums[key] for key in used}
        with torch.no_grad():
            for key, p in master.named_parameters():
                if key in used:
                    p -= 0.1 * sums[key]
        model.load_state_dict(master.state_dict())
    limit = 3e-2  # a master's last bit may turn a bf16's, of 8
    for _, got, weights, _, offset in results:
        assert got.keys() == gradients.keys()
        assert not any(key.startswith(("frozen", "never")) for key in got)
        for key, value in gradients.items():
            assert not value.numel() or relative(got[key], value) <= limit, key
        for key, p in master.named_parameters():
            assert not p.numel() or relative(weights[key], p.detach().to(BF16)) <= limit, key
            assert torch.equal(weights[key], results[0][2][key]), key
        assert torch.equal(offset, torch.ones(4))
    # Shard 0 has rows 0-3 of seven, shard 1 the rest; replica 0 their first halves. Ranks are (0, 0), (0, 1), (1, 0), …
    assert [rows["seven.weight"] for *_, rows, _ in results] == [2, 2, 2, 1]
    assert [rows["two.weight"] for *_, rows, _ in results] == [1, 1, 0, 0]
    assert [rows["one.weight"] for *_, rows, _ in results] == [1, 0, 0, 0]


def _killed(rank: int, world: int, where: str, victim: int) -> tuple:
    model = fully_shard(build("conv"), mesh=mesh_of((2, 2)), timeout=LONG_S)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (batch,) = microbatches("conv", [3], seed=0)

    def die(*_: object) -> None:
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)

    start_s = time.monotonic()
    try:
        for number in range(2):
            with minibatch(model, tokens=1):
                CASES["conv"].loss(model, batch).backward()
            if number == 1 and where == "sum":
                die()
            if number == 1 and where == "step":
                optimizer.register_step_post_hook(die)  # comes after our own
                optimizer.register_step_pre_hook(die)
            optimizer.step()
        with minibatch(model, tokens=1):
            pass
    except OdcError as error:
        return type(error).__name__, error.ranks, str(error), time.monotonic() - start_s
    return "no error", [], "", 0.0


@pytest.mark.parametrize(("where", "victim"), [("sum", 3), ("step", 0)])
def test_a_killed_rank_is_named_by_all_others(where: str, victim: int) -> None:
    with ranks.start(_killed, 4, where, victim) as job:
        others = [rank for rank in range(4) if rank != victim]
        for outcome in job.wait_for(others):
            assert outcome.error is None, outcome.error
            kind, named, text, seconds = outcome.value
            assert (kind, named) == ("RankLost", [victim]), text
            assert f"rank {victim} died" in text
            assert seconds < LONG_S / 2  # found dead, not late


def _raising(rank: int, world: int) -> tuple[dict, list]:
    model = fully_shard(build("conv"), mesh=mesh_of((2, 2)))
    (batch,) = microbatches("conv", [3], seed=0)
    failed = {}
    for number in range(2):
        try:
            with minibatch(model):
                CASES["conv"].loss(model, batch).backward()
                if rank == 2 and number == 0:
                    raise ValueError("no luck")
        except MinibatchFailed as error:
            failed = error.ranks
            assert all(p.grad is None for p in model.parameters())
    return failed, [p.grad.full_tensor() for p in model.parameters()]


def test_a_microbatch_that_raised_fails_on_all_replicas(in_ranks: dict[str, list]) -> None:
    """And in the next one, without tokens, gradients are divided by the number of all ranks."""
    model = build("conv")
    CASES["conv"].loss(model, microbatches("conv", [3], seed=0)[0]).backward()
    for failed, gradients in in_ranks["raising"]:
        assert failed == {2: "ValueError: no luck"}
        for got, p in zip(gradients, model.parameters(), strict=True):
            torch.testing.assert_close(got.view_as(p), p.grad, rtol=1e-4, atol=1e-5)  # of four equal summands, in fp32
