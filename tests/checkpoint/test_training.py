"""`Checkpoints`: a run that goes on from one is the run that was not interrupted, on any number of ranks."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from odc_triton import fully_shard, minibatch
from odc_triton.checkpoint import dcp
from odc_triton.checkpoint.folder import Manifest, load_checkpoint, write_checkpoint
from odc_triton.checkpoint.random_state import random_state, restore_random_state
from odc_triton.engine.api import engine_of
from odc_triton.jobs.checkpoints.steps import Checkpoints
from tests.support import blocks, ranks
from tests.support.checkpointed import make, train

SAVED_AT, STEPS = 2, 4
DEADLINE_S = 6.0
STATE = {"step": SAVED_AT, "seed": 7, "sampler": {"epoch": 1, "position": 3}}


def _save(rank: int, world: int, folder: Path, name: str, bf16: bool, noise: bool) -> list[float]:
    model, optimizer = make(name, bf16)
    torch.manual_seed(rank)
    random.seed(rank)
    train(model, optimizer, name, range(SAVED_AT), noise=noise)
    path = Checkpoints(folder, keep=2).save(model=model, optimizer=optimizer, state=STATE, step=SAVED_AT)
    assert path == folder / "step-00000002"
    return train(model, optimizer, name, range(SAVED_AT, STEPS), noise=noise)


def _resume(rank: int, world: int, folder: Path, name: str, bf16: bool, noise: bool) -> tuple[list[float], float]:
    """The losses, and a random number."""
    model, optimizer = make(name, bf16, seed=9)
    checkpoints = Checkpoints(folder, keep=2)
    assert checkpoints.load(checkpoints.newest(), model=model, optimizer=optimizer) == STATE
    drawn = torch.rand((), generator=_copy_of_generator()).item()
    assert optimizer.param_groups[0]["lr"] == 1e-2 / SAVED_AT
    return train(model, optimizer, name, range(SAVED_AT, STEPS), noise=noise), drawn


def _copy_of_generator() -> torch.Generator:
    generator = torch.Generator()
    generator.set_state(torch.get_rng_state())
    return generator


Cases = list[tuple[str, bool]]


def _save_and_resume(rank: int, world: int, folder: Path, cases: Cases) -> None:
    """With the random numbers that each rank had."""
    for name, bf16 in cases:
        want = _save(rank, world, folder / name, name, bf16, True)
        got, _ = _resume(rank, world, folder / name, name, bf16, True)
        # Exactly the same state; only the sums over ranks may be taken in another order.
        torch.testing.assert_close(got, want, rtol=1e-5 if world > 1 else 0, atol=0)


def _each(rank: int, world: int, folder: Path, cases: Cases, do: Any) -> list:
    return [do(rank, world, folder / name, name, bf16, False) for name, bf16 in cases]


def test_resuming_on_one_rank_is_bitwise(tmp_path: Path) -> None:
    ranks.run(_save_and_resume, 1, tmp_path, [("qwen2", False), ("gpt2-tied", True), ("conv", False)])


def test_resuming_on_other_ranks(tmp_path: Path) -> None:
    """On as many ranks; and on one more, where no loss depends on the random numbers."""
    cases = [("qwen2", True), ("conv", False), ("deepseek-v3", False)]
    ranks.run(_save_and_resume, 2, tmp_path / "same", cases[-1:])
    (wants, *_) = ranks.run(_each, 2, tmp_path, cases, _save)
    for of_model in zip(wants, *ranks.run(_each, 3, tmp_path, cases, _resume), strict=True):
        want, *resumed = of_model
        for got, _ in resumed:
            torch.testing.assert_close(got, want, rtol=1e-5, atol=0)
        assert len({drawn for _, drawn in resumed}) == 3, "random numbers of their own"


def _loads_late(rank: int, world: int, folder: Path) -> None:
    """Each rank in turn takes longer than the deadline: 1 for digests, 0 for values."""
    model, optimizer = make("qwen2", bf16=False)
    path = Checkpoints(folder, keep=1).save(model=model, optimizer=optimizer, state={}, step=0)
    engine_of(model).barrier.timeout_s = DEADLINE_S

    def late(call: Any, on: int) -> Any:
        return lambda *given: (time.sleep((DEADLINE_S + 1) * (rank == on)), call(*given))[1]

    with (
        mock.patch.object(Manifest, "check_digests", late(Manifest.check_digests, 1)),
        mock.patch.object(dcp, "read_into", late(dcp.read_into, 0)),
    ):
        load_checkpoint(path, model=model, optimizer=optimizer)


@pytest.mark.slow  # two deadlines must expire
def test_ranks_wait_for_one_that_reads_for_longer(tmp_path: Path) -> None:
    """As where fewer ranks wrote, so that some have a large file and others none."""
    ranks.run(_loads_late, 2, tmp_path)


def _wrapped(wrap: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = blocks.build()
    model.blocks = nn.ModuleList(map(wrap, model.blocks))
    return (model := fully_shard(model)), torch.optim.AdamW(model.parameters(), lr=1e-2)


def test_wrapped_modules(tmp_path: Path) -> None:
    """The names in a checkpoint are those without wrappers: it is read with them, and without."""
    model, optimizer = _wrapped(checkpoint_wrapper)
    write_checkpoint(tmp_path / "first", model=model, optimizer=optimizer, state={}, step=0)
    with minibatch(model, tokens=1):
        model(blocks.batch(0)).sum().backward()
    optimizer.step()
    write_checkpoint(tmp_path / "second", model=model, optimizer=optimizer, state={}, step=1)
    want = [optimizer.state[each]["exp_avg"].full_tensor() for each in model.parameters()]
    for wrap in (checkpoint_wrapper, lambda module: module):
        model, optimizer = _wrapped(wrap)
        load_checkpoint(tmp_path / "first", model=model, optimizer=optimizer)
        load_checkpoint(tmp_path / "second", model=model, optimizer=optimizer)
        got = [optimizer.state[each]["exp_avg"].full_tensor() for each in model.parameters()]
        assert all(map(torch.equal, got, want))


def test_before_the_first_step(tmp_path: Path) -> None:
    """An optimizer that never stepped goes on as one that never stepped: no state is made up."""
    model, optimizer = make("qwen2", bf16=False)
    checkpoints = Checkpoints(tmp_path, keep=1)
    path = checkpoints.save(model=model, optimizer=optimizer, state={"step": 0}, step=0)
    want = train(model, optimizer, "qwen2", range(2))
    other, its_optimizer = make("qwen2", bf16=False, seed=9)
    assert checkpoints.load(path, model=other, optimizer=its_optimizer) == {"step": 0}
    assert not its_optimizer.state
    assert train(other, its_optimizer, "qwen2", range(2)) == want


def test_random_numbers_go_on_where_they_were() -> None:
    """Python's keeps a second normal number for the next call."""

    def draw() -> list[float]:
        return [random.gauss(0, 1), random.random(), torch.rand(()).item()]

    random.seed(3)
    draw()
    saved = json.loads(json.dumps(random_state()))
    want = draw()
    draw()
    restore_random_state(saved)
    assert draw() == want


def _folder(folder: Path, name: str, *, number: int, step: int) -> Path:
    """A checkpoint without files."""
    (folder / name).mkdir()
    (folder / name / "manifest.json").write_bytes(Manifest(number=number, step=step, world=1, files={}).to_json())
    return folder / name


def test_what_an_earlier_branch_left_is_removed_first(tmp_path: Path) -> None:
    """After a run has gone back its checkpoints are the newer ones, whatever their steps."""
    _folder(tmp_path, "step-00000030", number=2, step=30)
    _folder(tmp_path, "step-00000015", number=3, step=15)
    Checkpoints(tmp_path, keep=2).prune(_folder(tmp_path, "step-00000018", number=4, step=18))
    left = sorted(path.name for path in tmp_path.glob("step-*"))
    assert left == ["step-00000015", "step-00000018"]


def test_a_checkpoint_that_was_being_replaced_is_there_again(tmp_path: Path) -> None:
    """A run was killed between the renames of the old one and of the new one."""
    _folder(tmp_path, "step-00000020", number=1, step=20)
    _folder(tmp_path, ".step-00000030.0123abcd.replaced", number=2, step=30)
    assert Checkpoints(tmp_path, keep=2).newest() == tmp_path / "step-00000030"


def _grouped(rank: int, world: int, folder: Path, swapped: bool) -> list[tuple[float, float]]:
    """By group, weights before biases, weight decay and learning rate: as saved, or as loaded into other groups."""
    model, _ = make("conv", False)
    groups = [
        {"params": [p for name, p in model.named_parameters() if ("bias" in name) == biases], "weight_decay": decay}
        for biases, decay in ((False, 0.1), (True, 0.2))
    ]
    optimizer, checkpoints = torch.optim.AdamW(groups[::-1] if swapped else groups, lr=0.1), Checkpoints(folder, keep=1)
    if swapped:
        checkpoints.load(checkpoints.newest(), model=model, optimizer=optimizer)
    else:
        optimizer.param_groups[1]["lr"] = 0.3
        train(model, optimizer, "conv", range(1))
        checkpoints.save(model=model, optimizer=optimizer, state={}, step=1)
    found = [(group["weight_decay"], group["lr"]) for group in optimizer.param_groups]
    return found[::-1] if swapped else found


def test_groups_in_another_order(tmp_path: Path) -> None:
    """Hyperparameters follow the parameters' names."""
    saved, loaded = (ranks.run(_grouped, 1, tmp_path, swapped) for swapped in (False, True))
    assert saved == loaded
    assert saved[0][0] != saved[0][1]
