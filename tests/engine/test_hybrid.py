"""Several replicas of ranks that share memory: gradients summed and parameters exchanged over a process group."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from bench.suites.hosts_net import inside
from odc_triton import MinibatchFailed, MixedPrecisionPolicy, OdcError, full_parameters, fully_shard, minibatch
from odc_triton.sharding.footprint import memory_plan
from tests.support import namespaces, ranks, slow, two_hosts
from tests.support.checkpointed import train
from tests.support.deadlines import LONG_S, SHORT_S
from tests.support.models import CASES, build, microbatches
from tests.support.parity import compare, relative, unsharded, whole_model_error
from tests.support.replicas import Rows, mesh_of

BF16 = torch.bfloat16


# ---------------------------------------------------------------------- against one process


@pytest.mark.parametrize(
    ("shape", "name", "backend", "style"),
    [
        ((2, 2), "conv", "cpu", "root"),
        ((2, 2), "qwen2", "cpu-sharded", "bottom-up"),
        ((3, 1), "conv", "cpu-sharded", "root"),
    ],
)
def test_against_one_process(shape: tuple[int, int], name: str, backend: str, style: str) -> None:
    """Uneven counts, a rank without microbatches; in "conv" a scalar, an empty parameter and rows fewer than ranks."""
    compare(name, torch.Size(shape).numel(), style=style, backend=backend, steps=6, shape=shape)


def _masters(rank: int, world: int, shape: tuple[int, int]) -> tuple[int, int]:
    """Elements of this rank's masters, bytes of its optimizer's state."""
    model = fully_shard(build("conv"), mesh=mesh_of(shape))
    optimizer = torch.optim.AdamW(model.parameters())
    with minibatch(model):
        CASES["conv"].loss(model, microbatches("conv", [3], seed=0)[0]).backward()
    optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values()]
    state_bytes = sum(getattr(value, "_local_tensor", value).nbytes for value in states)
    return sum(p.to_local().numel() for p in model.parameters()), state_bytes


def test_masters_are_on_all_ranks_each_element_once() -> None:
    masters = ranks.run(_masters, 4, (2, 2))
    assert sum(elements for elements, _ in masters) == sum(p.numel() for p in build("conv").parameters())
    assert masters[0][1] == memory_plan(build("conv"), 2, replicas=2).optimizer_state_bytes


# ---------------------------------------------------------------------- shapes, dtypes, initial values


def _rows(rank: int, world: int, dtype: torch.dtype | None, meta: str) -> tuple:
    from odc_triton.comm import replicas

    if meta == "others":
        replicas._BUFFER_BYTES = 48  # parts are cut to fit it
    torch.manual_seed(0)
    where = "meta" if meta == "all" or (meta == "others" and rank) else "cpu"
    with torch.device(where):
        model = Rows()
    if rank and where == "cpu":
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(float("nan"))  # rank 0's values count
    policy, backend = MixedPrecisionPolicy(param_dtype=dtype), "cpu" if dtype is None else "cpu-sharded"
    model = fully_shard(model, mesh=mesh_of((2, 2)), mp_policy=policy, backend=backend)
    start = dict(full_parameters(model))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))
    gradients = {}
    for _ in range(2):
        with minibatch(model, tokens=1):
            model(x.to(dtype or torch.float32)).backward()
        gradients = {key: p.grad.full_tensor().clone() for key, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    rows = {key: len(p.to_local()) if p.dim() else None for key, p in model.named_parameters()}
    return start, gradients, dict(full_parameters(model)), rows, model.state_dict()["offset"]


@pytest.mark.parametrize(
    ("dtype", "meta"),
    [
        (None, "none"),
        (BF16, "others"),
        slow(BF16, "all"),
    ],
)
def test_odd_rows(dtype: torch.dtype | None, meta: str) -> None:
    results = ranks.run(_rows, 4, dtype, meta)
    compute = dtype or torch.float32
    master, model = Rows(), Rows().to(compute)
    start = results[0][0]
    if meta != "all":
        torch.manual_seed(0)
        plain = Rows().state_dict()
        assert all(torch.equal(start[key], plain[key].to(compute)) for key in start)
    master.load_state_dict(start, strict=False)
    if dtype is not None and meta == "others":
        torch.manual_seed(0)
        master.load_state_dict(Rows().state_dict())
    model.load_state_dict(start, strict=False)
    gradients: dict[str, torch.Tensor] = {}
    for _ in range(2):
        model.zero_grad()
        sums = {key: torch.zeros_like(p) for key, p in master.named_parameters()}
        for rank in range(4):
            model.zero_grad()
            model(torch.randn(3, 4, generator=torch.Generator().manual_seed(rank)).to(compute)).backward()
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
    limit = 1e-5 if dtype is None else 3e-2  # a master's last bit may turn a bf16's, of 8
    for _, got, weights, _, offset in results:
        assert got.keys() == gradients.keys()
        assert not any(key.startswith(("frozen", "never")) for key in got)
        for key, value in gradients.items():
            assert not value.numel() or relative(got[key], value) <= limit, key
        for key, p in master.named_parameters():
            assert not p.numel() or relative(weights[key], p.detach().to(compute)) <= limit, key
            assert torch.equal(weights[key], results[0][2][key]), key
        assert torch.equal(offset, torch.ones(4))
    # Shard 0 has rows 0-3 of seven, shard 1 the rest; replica 0 their first halves. Ranks are (0, 0), (0, 1), (1, 0), …
    assert [rows["seven.weight"] for *_, rows, _ in results] == [2, 2, 2, 1]
    assert [rows["two.weight"] for *_, rows, _ in results] == [1, 1, 0, 0]
    assert [rows["one.weight"] for *_, rows, _ in results] == [1, 0, 0, 0]


# ---------------------------------------------------------------------- checkpoints


def _sharded(shape: tuple[int, ...], name: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    policy = MixedPrecisionPolicy(param_dtype=BF16 if name == "qwen2" else None)
    model = fully_shard(build(name, seed), mesh=mesh_of(shape), mp_policy=policy)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def _save(rank: int, world: int, shape: tuple[int, ...], folder: str, name: str) -> list[float]:
    model, optimizer = _sharded(shape, name, seed=0)
    train(model, optimizer, name, range(2))
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=f"{folder}/sharded")
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        torch.save(whole, f"{folder}/whole.pt")
    return train(model, optimizer, name, range(2, 4))


def _load(rank: int, world: int, shape: tuple[int, ...], folder: str, name: str) -> tuple[list[float], bool]:
    model, optimizer = _sharded(shape, name, seed=9)
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=f"{folder}/sharded")
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    loaded = {key: p.full_tensor().clone() for key, p in model.named_parameters()}
    whole = torch.load(f"{folder}/whole.pt")
    same = all(torch.equal(value, whole[key]) for key, value in loaded.items())
    model.load_state_dict(whole)  # whole tensors, of which each rank takes its part
    same = same and all(torch.equal(p.full_tensor(), whole[key]) for key, p in model.named_parameters())
    return train(model, optimizer, name, range(2, 4)), same


@pytest.mark.parametrize(
    ("name", "saved", "loaded"),
    [
        ("conv", (2, 2), [(2,)]),
        slow("conv", (2,), [(2, 2)]),
        slow("qwen2", (2, 2), [(2,)]),  # bf16 beside fp32 masters
    ],
)
def test_checkpoints_across_mesh_shapes(tmp_path: Path, name: str, saved: tuple, loaded: list[tuple]) -> None:
    (want, *_) = ranks.run(_save, torch.Size(saved).numel(), saved, str(tmp_path), name)
    for shape in loaded:
        for losses, same in ranks.run(_load, torch.Size(shape).numel(), shape, str(tmp_path), name):
            assert same
            # Exactly the same state; only the sums over ranks may be taken in another order.
            torch.testing.assert_close(losses, want, rtol=1e-6, atol=0)


# ---------------------------------------------------------------------- a rank dies


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


def test_a_microbatch_that_raised_fails_on_all_replicas() -> None:
    """And in the next one, without tokens, gradients are divided by the number of all ranks."""
    model = build("conv")
    CASES["conv"].loss(model, microbatches("conv", [3], seed=0)[0]).backward()
    for failed, gradients in ranks.run(_raising, 4):
        assert failed == {2: "ValueError: no luck"}
        for got, p in zip(gradients, model.parameters(), strict=True):
            torch.testing.assert_close(got.view_as(p), p.grad, rtol=1e-4, atol=1e-5)  # of four equal summands, in fp32


def _stopped(rank: int, world: int) -> tuple:
    """Rank 3 stops before its part of the sum."""
    model = fully_shard(build("conv"), mesh=mesh_of((2, 2)), timeout=10 * SHORT_S)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if rank == 3:
        model._odc_engine.replicas.sum = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)
    try:
        for _ in range(2):
            with minibatch(model, tokens=1):
                CASES["conv"].loss(model, microbatches("conv", [3], seed=0)[0]).backward()
            optimizer.step()
    except OdcError as error:
        return type(error).__name__, error.ranks
    return "no error", []


@pytest.mark.slow
def test_a_stopped_rank_is_named_at_the_deadline() -> None:
    with ranks.start(_stopped, 4) as job:
        outcomes = job.wait_for([0, 1, 2])
        assert [outcome.error for outcome in outcomes] == [None] * 3
        # Rank 1 waits for the stopped one's part of the sum, and gives up first; nobody is to blame but rank 3.
        assert outcomes[1].value == ("DeadlineExceeded", [3])
        for outcome in outcomes:
            assert outcome.value in (("DeadlineExceeded", [3]), ("RankLost", [3]))


# ---------------------------------------------------------------------- between hosts


@pytest.mark.slow
def test_two_hosts(tmp_path: Path) -> None:
    """Replicas in two network namespaces: nothing goes between them but by TCP."""
    namespaces.require()
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = inside(sys.executable, "-m", "tests.support.two_hosts", str(tmp_path))
    subprocess.run(command, check=True, timeout=LONG_S, env=environment, cwd=Path(__file__).parents[2])
    seen = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(4)]
    _, want, want_norms = unsharded("conv", two_hosts.STEPS)
    for rank, theirs in enumerate(seen):
        assert "ranks 0 to 3 must share memory but are on several hosts" in theirs["one dimension"]
        assert theirs["without a mesh"] == (2, [rank % 2, rank % 2 + 2])
        _, weights, norms, *_ = theirs["trained"]
        assert whole_model_error(weights, want) <= 1e-5  # fp32 sums in another order
        torch.testing.assert_close(norms, want_norms, rtol=1e-4, atol=0)
    heaps = [theirs["heaps"] for theirs in seen]
    assert heaps[0] == heaps[1] != set()
    assert heaps[2] == heaps[3] != set()
    assert not heaps[0] & heaps[2]
    for theirs in seen[:3]:
        kind, ranks_named, seconds = theirs["killed"]
        assert (kind, ranks_named) == ("RankLost", [3])
        assert seconds < LONG_S / 2  # found dead, not late
