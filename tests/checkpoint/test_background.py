"""Checkpoints written in the background: what is in them, how they fail, who waits for them."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from odc_triton import MixedPrecisionPolicy, memory_plan, minibatch
from odc_triton.base.errors import DeadlineExceeded
from odc_triton.checkpoint.folder import Saving
from odc_triton.engine.api import engine_of
from odc_triton.jobs.checkpoints.background import BackgroundCheckpoints, Stage
from odc_triton.jobs.checkpoints.steps import Checkpoints, verify
from tests.support import ranks
from tests.support.checkpointed import make, settle, train, unfinished, writers
from tests.support.deadlines import LONG_S, SHORT_S
from tests.support.models import build

MODEL = "qwen2"
STEPS = 4


@contextmanager
def writers_held_back() -> Iterator[threading.Event]:
    """In this block this rank's background writers wait for the event, which is set when the block ends."""
    go_on, write = threading.Event(), Saving.write

    def late(saving: Saving, *is_dropped: Callable[[], bool]) -> dict[str, Any]:
        while is_dropped and not go_on.wait(0.01):
            if is_dropped[0]():
                raise InterruptedError("dropped")
        return write(saving, *is_dropped)

    with mock.patch.object(Saving, "write", late):
        try:
            yield go_on
        finally:
            go_on.set()


def _saved_both_ways(rank: int, world: int, folder: Path, bf16: bool) -> tuple[list[float], int]:
    """Saves step 2 at once and in the background, where it is written after the last step. Returns the losses, and the
    bytes of host memory."""
    model, optimizer = make(MODEL, bf16)
    torch.manual_seed(rank)
    at_once, later = Checkpoints(folder / "at once", keep=2), Checkpoints(folder / "later", keep=1)
    background = BackgroundCheckpoints(later, model=model)
    losses = []
    addresses = set()
    for step in range(1, STEPS + 1):
        losses += train(model, optimizer, MODEL, range(step - 1, step), noise=True)
        settle(background, model)
        if step == 1:
            background.save(optimizer=optimizer, state={"step": step}, step=step)
        elif step == 2:
            how = {"optimizer": optimizer, "state": {"step": step, "seed": 7}, "step": step}
            at_once.save(model=model, **how)
            background.wait()
            assert background.is_idle
            addresses = {value.data_ptr() for value in background._memory.values()}
            with writers_held_back() as go_on:
                background.save(**how)
                losses += train(model, optimizer, MODEL, range(step, STEPS), noise=True)
                settle(background, model)
                assert not background.is_idle
                assert not (folder / "later" / "step-00000002").exists()
                go_on.set()
            background.wait()
            break
    assert len(losses) == STEPS
    assert addresses == {value.data_ptr() for value in background._memory.values()}  # the memory is used again
    assert writers() == []
    dist.barrier()
    assert unfinished(folder / "later") == []
    assert [path.name for path in later.all()] == ["step-00000002"]  # the thread removes older ones
    storages = {value.data_ptr(): value.nbytes for value in background._memory.values() if value.nbytes}
    return losses, sum(storages.values())


def _read(rank: int, world: int, path: Path, bf16: bool) -> tuple[dict, dict, list[float]]:
    """A checkpoint's state, this rank's weights and optimizer states, and the losses of the steps after it."""
    model, optimizer = make(MODEL, bf16, seed=9)
    state = Checkpoints(path.parent, keep=1).load(path, model=model, optimizer=optimizer)
    values = {name: value.to_local().clone() for name, value in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for kind, value in optimizer.state[parameter].items():
            local = value.to_local() if hasattr(value, "to_local") else value
            values[f"{name}.{kind}"] = local.clone()
    values["random"] = torch.get_rng_state()
    return state, values, train(model, optimizer, MODEL, range(2, STEPS), noise=True)


@pytest.mark.parametrize(("world", "bf16"), [(1, False), (2, True)])
def test_it_is_what_a_step_that_waits_would_have_saved(tmp_path: Path, world: int, bf16: bool) -> None:
    """Bit for bit, though the masters and the optimizer's states have changed before it is written."""
    ((losses, host_bytes), *_) = ranks.run(_saved_both_ways, world, tmp_path, bf16)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if bf16 else None)
    plan = memory_plan(build(MODEL), world, mp_policy=policy, checkpoint_background=True)
    # The model's buffers are those of RoPE, which no checkpoint has.
    assert host_bytes == plan.checkpoint_host_bytes - plan.buffer_bytes
    for name in ("at once", "later"):
        verify(tmp_path / name / "step-00000002")
    at_once = ranks.run(_read, world, tmp_path / "at once" / "step-00000002", bf16)
    later = ranks.run(_read, world, tmp_path / "later" / "step-00000002", bf16)
    for (state, values, _), (its_state, its_values, went_on) in zip(at_once, later, strict=True):
        assert its_state == state == {"step": 2, "seed": 7}
        torch.testing.assert_close(its_values, values, rtol=0, atol=0)
        if world == 1:
            assert went_on == losses[2:]  # dropout and all


def _late_writer(rank: int, world: int, folder: Path) -> str:
    model, optimizer = make(MODEL, bf16=False)
    background = BackgroundCheckpoints(Checkpoints(folder, keep=1), model=model)
    train(model, optimizer, MODEL, range(1))
    with writers_held_back() as go_on:
        if rank == 0:
            go_on.set()
        background.save(optimizer=optimizer, state={}, step=1)
        if rank == 0:
            writers()[0].join()
        dist.barrier()
        engine_of(model).barrier.timeout_s = SHORT_S
        with pytest.raises(DeadlineExceeded) as caught:
            background.wait()
        assert caught.value.ranks == [1]
        assert background.is_idle
        assert writers() == []
        dist.barrier()
        assert unfinished(folder) == []
        return str(caught.value)


def test_a_disk_that_hangs_is_named_on_all_ranks(tmp_path: Path) -> None:
    for text in ranks.run(_late_writer, 2, tmp_path):
        assert re.search(r"ranks \[1\] have not written their part of .*step-00000001 within \d+ s", text), text


@pytest.fixture
def alone(tmp_path: Path) -> tuple[nn.Module, torch.optim.Optimizer, BackgroundCheckpoints]:
    """A world of one in this process, after a step."""
    model, optimizer = make(MODEL, bf16=False)
    background = BackgroundCheckpoints(Checkpoints(tmp_path, keep=3), model=model)
    train(model, optimizer, MODEL, range(1))
    return model, optimizer, background


def test_a_second_save_waits_for_the_first_and_says_so(
    alone: tuple, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    _, optimizer, background = alone
    with writers_held_back() as go_on:
        background.save(optimizer=optimizer, state={"step": 1}, step=1)
        later = threading.Timer(0.3, go_on.set)
        later.start()
        background.save(optimizer=optimizer, state={"step": 2}, step=2)
        assert go_on.is_set()
        later.join()
    first = tmp_path / "step-00000001"
    assert capsys.readouterr().out == f"waiting for {first}, which is still being written\n"
    background.wait()
    assert capsys.readouterr().out == ""
    assert [path.name for path in background.checkpoints.all()] == [first.name, "step-00000002"]


@pytest.mark.parametrize("hangs", [False, True])
def test_each_stage_has_the_deadline_for_itself(hangs: bool, alone: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    """All have written as it passes, so the checkpoint becomes whole, also if that takes too long to wait for."""
    model, optimizer, background = alone
    past_s, go_on, finish, settle = (
        engine_of(model).barrier.timeout_s + 1,
        threading.Event(),
        Saving.finish,
        background.settle,
    )
    clock, calls, finishing = [0.0], [], []

    def now() -> float:
        calls.append(clock[0])
        if len(calls) == 2:
            may_write.set()
        if background._stage is Stage.WRITING and not background._work.is_alive():
            clock[0] = past_s
        return clock[0]

    def settled(reports: list) -> None:
        settle(reports)
        if background._stage is Stage.FINISHING:
            finishing.append(reports)
        if len(finishing) == 2 and hangs:
            clock[0] += past_s
        elif len(finishing) == 2:
            go_on.set()

    def late(*arguments: Any, **how: Any) -> None:
        go_on.wait(LONG_S)
        finish(*arguments, **how)

    monkeypatch.setattr("odc_triton.jobs.checkpoints.background.time", SimpleNamespace(monotonic=now))
    monkeypatch.setattr("odc_triton.jobs.checkpoints.background._END_S", 0.0)
    monkeypatch.setattr(background, "settle", settled)
    monkeypatch.setattr(Saving, "finish", late)
    with writers_held_back() as may_write:
        background.save(optimizer=optimizer, state={}, step=1)
        if hangs:
            with pytest.raises(
                DeadlineExceeded, match=r"^rank 0 has not made .*step-00000001 of what all ranks have wr"
            ):
                background.wait()
            (writer,) = writers()
            go_on.set()
            writer.join()
        else:
            background.wait()
    assert max(calls) == past_s * (1 + hangs)
    assert [path.name for path in background.checkpoints.all()] == ["step-00000001"]


def test_closing_drops_what_is_not_written(alone: tuple, tmp_path: Path) -> None:
    _, optimizer, background = alone
    with writers_held_back():
        background.save(optimizer=optimizer, state={}, step=1)
        background.close()
    assert writers() == []
    assert background.checkpoints.all() == []
    assert unfinished(tmp_path) == []
    background.close()


def _closed_while_finishing(rank: int, world: int, folder: Path) -> None:
    model, optimizer = make(MODEL, bf16=False)
    background = BackgroundCheckpoints(Checkpoints(folder, keep=1), model=model)
    train(model, optimizer, MODEL, range(1))
    finish = Saving.finish

    def slowly(saving: Saving, *arguments: Any, **how: Any) -> None:
        time.sleep(0.5)
        finish(saving, *arguments, **how)

    with mock.patch.object(Saving, "finish", slowly):
        background.save(optimizer=optimizer, state={"step": 1}, step=1)
        writers()[0].join()
        settle(background, model)
        assert background.checkpoints.all() == []
        background.close()
    assert writers() == []


def test_closing_finishes_what_all_have_written(tmp_path: Path) -> None:
    ranks.run(_closed_while_finishing, 2, tmp_path)
    (path,) = Checkpoints(tmp_path, keep=1).all()
    verify(path)
    assert unfinished(tmp_path) == []


def test_tied_parameters_are_held_once(tmp_path: Path) -> None:
    model, optimizer = make("gpt2-tied", bf16=False)
    background = BackgroundCheckpoints(Checkpoints(tmp_path, keep=1), model=model)
    for step in (1, 2):  # the second finds memory
        background.save(optimizer=optimizer, state={}, step=step)
        background.wait()
        held = {name.removeprefix("model."): value.data_ptr() for name, value in background._memory.items()}
        assert held["lm_head.weight"] == held["transformer.wte.weight"]
        assert len(set(held.values())) == len(held) - 1


def test_a_writer_that_is_told_to_stop_ends_before_its_next_write(alone: tuple, tmp_path: Path) -> None:
    model, optimizer, _ = alone
    with pytest.raises(ValueError, match="state has the key 'odc_scales': keys that begin with 'odc_' are reserved"):
        Saving(tmp_path / "step-00000001", model=model, optimizer=optimizer, state={"odc_scales": {}}, step=1)
    saving = Saving(tmp_path / "step-00000001", model=model, optimizer=optimizer, state={}, step=1)
    with pytest.raises(InterruptedError, match="dropped, as the run ends"):
        saving.write(lambda: True)
    saving.abandon()
    assert unfinished(tmp_path) == []


def test_refused_inside_a_minibatch(alone: tuple) -> None:
    model, optimizer, background = alone
    with minibatch(model), pytest.raises(RuntimeError, match="saving inside a minibatch"):
        background.save(optimizer=optimizer, state={}, step=1)
