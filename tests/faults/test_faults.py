"""A microbatch raises; a rank is late, stops, leaves or is killed: errors name it, and nothing is left behind."""

from __future__ import annotations

import logging
import os
import re
import signal
import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from odc_triton import begin_minibatch, end_minibatch, full_parameters, fully_shard, minibatch, use_odc
from odc_triton.comm import barrier
from odc_triton.comm.barrier import Barrier
from odc_triton.comm.memory.heap import LEFT
from tests.support import bridged, leftovers, ranks
from tests.support.blocks import batch, build
from tests.support.deadlines import LONG_S, SHORT_S, until
from tests.support.refusals import caught, ended


def _raise(text: str) -> None:
    raise ValueError(text)


WHERE = ("forward", "backward", "loss", "forward, caught", "backward, caught")


def _failing(rank: int, world: int, where: str) -> tuple[str, int, dict[str, torch.Tensor]]:
    model = fully_shard(build())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def broken_microbatch() -> None:
        if "forward" in where:
            handle = model.blocks[1].register_forward_hook(lambda *_: _raise("no luck"))
        try:
            output = model(batch(rank))
            if where == "loss":
                _raise("no luck")
            if "backward" in where:
                output.register_hook(lambda _: _raise("no luck"))
            output.sum().backward()
        except ValueError:
            if "caught" not in where:
                raise
        finally:
            if "forward" in where:
                handle.remove()

    def step() -> None:
        with minibatch(model, tokens=1):
            model(batch(10 + rank)).sum().backward()
            if rank == 1:
                broken_microbatch()
            model(batch(20 + rank)).sum().backward()

    text = caught(step)
    gradients = sum(p.grad is not None for p in model.parameters())
    optimizer.step()  # changes nothing, but must not hang or raise either
    before = {name: value.clone() for name, value in full_parameters(model)}
    assert all(torch.equal(before[name], p) for name, p in build().named_parameters())
    with minibatch(model, tokens=1):
        model(batch(rank)).sum().backward()
    optimizer.step()
    return text, gradients, dict(full_parameters(model))


def test_microbatch_raised() -> None:
    want = build()
    optimizer = torch.optim.AdamW(want.parameters(), lr=0.1)
    for seed in range(2):
        want(batch(seed)).sum().backward()
    optimizer.step()
    for where, of_ranks in zip(WHERE, ranks.run_all(2, *((_failing, where) for where in WHERE)), strict=True):
        for text, gradients, weights in of_ranks:
            assert text.startswith("MinibatchFailed: minibatch 0 failed"), text
            assert ("a backward began and did not end" if where == "backward, caught" else "no luck") in text, where
            assert "rank 1: " in text
            assert "rank 0: " not in text
            assert gradients == 0, where
            torch.testing.assert_close(weights, dict(want.named_parameters()))


def _interrupted(rank: int, world: int) -> list[str]:
    def interrupt(*_: object) -> None:
        dist.barrier()
        os.kill(os.getpid(), signal.SIGINT)

    model = fully_shard(build(), timeout=LONG_S)
    seen = []
    try:
        with minibatch(model):
            if rank == 1:
                model.blocks[1].register_forward_hook(interrupt)
            model(batch(0)).sum().backward()
            dist.barrier()  # rank 0 only: if it began a microbatch after rank 1 had left, it would get no reason
    except (KeyboardInterrupt, RuntimeError) as error:
        seen.append(f"{type(error).__name__}: {error}")
    return [*seen, caught(lambda: begin_minibatch(model))]


def test_interrupted() -> None:
    first, second = ranks.run(_interrupted, 2)
    assert "MinibatchFailed" in first[0]
    assert "rank 1: KeyboardInterrupt" in first[0]
    assert first[1].startswith("RankLost")
    assert second[0].startswith("KeyboardInterrupt")
    assert "start again from the last checkpoint" in second[1]


def _look_late(board) -> None:
    """This rank is interrupted once it has seen that nobody has left, until rank 0 has."""
    seen = board.seen

    def late(slot: int) -> list[int]:
        values = seen(slot)
        while slot == LEFT and board.is_alive(0):
            time.sleep(0.01)
        return values

    board.seen = late


def _late(rank: int, world: int, where: str, timeout_s: float, sleep_s: float) -> tuple:
    lines: list[str] = []
    barrier._FIRST_WARNING_S = SHORT_S / 2
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("odc_triton").addHandler(handler)

    def doze(here: str, model: torch.nn.Module | None = None) -> None:
        if here == where:
            dist.barrier()  # the others are not late
            if model is not None:
                model._odc_engine.barrier.timeout_s = timeout_s
                if rank == 2:
                    _look_late(model._odc_engine.barrier.board)
            if rank == 1:
                time.sleep(sleep_s)

    def action() -> None:
        doze("fully_shard")
        model = fully_shard(build(), timeout=timeout_s if where == "fully_shard" else LONG_S)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        with minibatch(model):
            model(batch(0)).sum().backward()
        optimizer.register_step_pre_hook(lambda *_: doze("evaluation", model))
        optimizer.step()
        if where == "evaluation":
            model(batch(0))
        doze("enter", model)
        begin_minibatch(model)
        model(batch(0)).sum().backward()
        end_minibatch(model)

    return *ended(action), lines


@pytest.mark.parametrize("where", ["fully_shard", "evaluation"])
def test_never_arrives(where: str) -> None:
    with ranks.start(_late, 3, where, SHORT_S, LONG_S) as job:
        outcomes = job.wait_for([0, 2])
    waited = []
    for outcome in outcomes:
        kind, named, text, _, _ = outcome.value
        assert kind == "DeadlineExceeded", text
        assert named == [1]
        waited += re.findall(r"has waited ([\d.]+) s for rank 1 at '", text)
        assert "rank 1 at '" in text
    assert waited, "the other may say that one has given up, but not both"
    assert min(map(float, waited)) >= SHORT_S


def test_late_but_live() -> None:
    first, second = ranks.run(_late, 2, "enter", LONG_S, SHORT_S)
    assert first[0] == second[0] == "no error", first[2] + second[2]
    assert any("for rank 1 at" in line and "deadline is 300 s" in line for line in first[4]), first[4]
    assert second[4] == []


def _leaving(rank: int, world: int, exits: bool) -> tuple:
    model = fully_shard(build(), timeout=LONG_S)
    if not exits:
        model._odc_engine.barrier.timeout_s = SHORT_S

    def action() -> None:
        for _ in range(1 if rank == 1 else 2):
            with minibatch(model):
                model(batch(0)).sum().backward()

    result = ended(action)
    if rank == 1 and not exits:
        time.sleep(LONG_S)
    return result


@pytest.mark.parametrize("exits", [True, False])
def test_leaves_the_loop_early(exits: bool) -> None:
    with ranks.start(_leaving, 3, exits) as job:
        for outcome in job.wait_for([0, 2]):
            kind, named, text, waited_s = outcome.value
            assert kind == ("RankLost" if exits else "DeadlineExceeded"), text
            assert named == [1]
            assert "'enter minibatch 1'" in text
            assert "last seen in minibatch 0" in text
            assert "left the training loop" in text or not exits
            assert waited_s < LONG_S / 2


def _struck(rank: int, world: int, number: int, victim: int, where: str, folder: str) -> tuple:
    """In the second of three minibatches the victim sends itself the signal."""
    tempfile.tempdir = folder
    os.environ["TMPDIR"] = folder
    dist.barrier()  # they start together
    model = fully_shard(build(), timeout=SHORT_S if number == signal.SIGSTOP else LONG_S)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    heap = model._odc_engine.heap

    def strike(*_: object) -> None:
        if where == "lock":
            assert heap.try_lock(0, 0)
            time.sleep(0.5)  # meanwhile the others reach the lock
        os.kill(os.getpid(), number)

    def action() -> None:
        for step in range(3):
            strikes = rank == victim and step == 1
            with minibatch(model):
                if strikes and where in ("forward", "lock"):
                    model.blocks[1].register_forward_hook(strike)
                if where == "lock" and step == 1 and rank != victim:
                    until(lambda: heap.lock_holder(0, 0) is not None, every_s=0.001)
                output = model(batch(0))
                if strikes and where == "backward":
                    output.register_hook(strike)
                output.sum().backward()
            if strikes and where == "step":
                optimizer.register_step_pre_hook(strike)
            optimizer.step()

    return ended(action)


@pytest.mark.parametrize("where", ["forward", "lock"])
def test_stopped(where: str, tmp_path: Path) -> None:
    with ranks.start(_struck, 2, signal.SIGSTOP, 1, where, str(tmp_path)) as job:
        (first,) = job.wait_for([0])
        assert first.error is None, first.error
        kind, named, text, _ = first.value
        assert kind == "DeadlineExceeded"
        assert named == [1]
        assert ("its lock is held by rank 1" if where == "lock" else "for rank 1 at 'leave minibatch 1'") in text
        os.kill(job.processes[1].pid, signal.SIGCONT)
        (second,) = job.wait_for([1])
        if where == "lock":  # it learns that rank 0 gave up
            assert second.value[0] == "MinibatchFailed"
            assert "rank 0: DeadlineExceeded" in second.value[2]
        else:  # rank 0 had reached the exit before it gave up, so this minibatch is whole; the next is not
            assert second.value[:2] == ("RankLost", [0])
            assert "enter minibatch 2" in second.value[2]


def _killed_at_the_start(rank: int, world: int, call: str, victim: int, where: str) -> tuple:
    from odc_triton.comm.memory import heap

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    make, shard = (build, fully_shard) if call == "fully_shard" else (bridged.sharded, use_odc)
    model = make()
    if rank == victim:
        if where == "before":
            die()
        place, name = (
            (Barrier, "exchange") if "barrier" in where else (heap, "send_files" if rank == 0 else "receive_files")
        )
        setattr(place, name, die)
    return ended(lambda: shard(model, timeout=LONG_S))


@pytest.mark.parametrize(
    ("call", "victim", "where"),
    [("fully_shard", 1, "before"), ("use_odc", 0, "at the first barrier"), ("fully_shard", 2, "at the heap")],
)
def test_killed_at_the_start(call: str, victim: int, where: str) -> None:
    """Before ranks share memory, in which they see who is alive. A late rank may see that others ended too."""
    with ranks.start(_killed_at_the_start, 3, call, victim, where) as job:
        outcomes = job.wait_for([rank for rank in range(3) if rank != victim])
    for outcome in outcomes:
        assert outcome.error is None, outcome.error
        kind, named, text, waited_s = outcome.value
        assert kind == "RankLost", text
        assert victim in named
        assert f"rank {victim} died" in text
        assert waited_s < LONG_S / 2, "not at the deadline"
    assert [victim] in [outcome.value[1] for outcome in outcomes]


MANY = 2_000


def _works_on(rank: int, world: int) -> tuple:
    """Rank 1 is killed in its second microbatch, rank 0 has many left."""
    model = fully_shard(build(), timeout=LONG_S)
    done = []

    def action() -> None:
        with minibatch(model):
            for number in range(MANY):
                if rank == 1 and number == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                model(batch(number)).sum().backward()
                done.append(number)
                time.sleep(0.01)

    outcome = ended(action)
    return len(done), *outcome


def test_a_death_is_known_at_the_next_microbatch() -> None:
    with ranks.start(_works_on, 2) as job:
        outcome = job.join()[0]
    assert outcome.error is None, outcome.error
    done, kind, named, text, _ = outcome.value
    assert (kind, named) == ("RankLost", [1])
    assert "'the shards of all ranks in minibatch 0': rank 1 died" in text
    assert done < MANY / 2


@pytest.mark.parametrize(("where", "store_in_rank_0"), [("backward", True), ("lock", False), ("step", True)])
def test_killed(where: str, store_in_rank_0: bool, tmp_path: Path) -> None:
    """With the store in rank 0, rank 0 is the one that dies: naming it must not need the store."""
    victim = 0 if store_in_rank_0 else 1
    before = leftovers.names()
    with ranks.start(_struck, 3, signal.SIGKILL, victim, where, str(tmp_path), store_in_rank_0=store_in_rank_0) as job:
        outcomes = job.join()
        for rank, outcome in enumerate(outcomes):
            if rank == victim:
                assert outcome.signal == signal.SIGKILL
                continue
            assert outcome.error is None, outcome.error
            kind, named, text, waited_s = outcome.value
            assert kind == "RankLost", text
            assert named == [victim]
            assert f"rank {victim} died" in text
            assert waited_s < LONG_S / 2
        assert not any(process.is_alive() for process in job.processes)
        assert list(tmp_path.iterdir()) == []
        leftovers.assert_none_since(before)
