"""Muon on shards against torch.optim.Muon on whole matrices: the same gradients give the same weights."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from odc_triton import fully_shard
from odc_triton.jobs.checkpoints.steps import Checkpoints
from odc_triton.optim import ChainedOptimizer, Muon, muon
from odc_triton.optim.buffers import newton_schulz_cost
from tests.support import ranks, recorded, slow
from tests.support.recorded import MATRICES, give_gradients, plain, sharded, step_on
from tests.support.refusals import caught, compare

STEPS = 8


def _late(function: Callable, seconds: float) -> Callable:
    def late(*arguments: object) -> object:
        time.sleep(seconds)
        return function(*arguments)

    return late


def _steps(rank: int, world: int, shape: tuple[int, ...], backend: str, options: dict) -> tuple[dict, list[int]]:
    """The first rank is late with its rows and the last one with its matrices, so that a missing wait shows."""
    model, optimizer = sharded(shape, backend, **options)
    if rank == world - 1:
        muon._zeropower_via_newtonschulz = _late(muon._zeropower_via_newtonschulz, 0.003)
    if rank == 0:
        optimizer.optimizers[0]._step_all = _late(optimizer.optimizers[0]._step_all, 0.003)
    weights = step_on(model, optimizer, range(STEPS))
    return weights, optimizer.optimizers[0]._buffers.mine


@pytest.mark.parametrize(
    ("shape", "backend", "options"),
    [
        ((1,), "cpu", {}),
        ((2,), "cpu-sharded", {"nesterov": False, "momentum": 0.8}),
        ((3,), "cpu", {"adjust_lr_fn": "match_rms_adamw", "ns_steps": 3}),
        ((4,), "cpu-sharded", {}),
        ((2, 2), "cpu", {}),
        slow((2,), "cpu", {"lr": torch.tensor(0.02), "weight_decay": 0.0}),
    ],
)
def test_the_same_gradients_give_the_same_weights(shape: tuple[int, ...], backend: str, options: dict) -> None:
    want, results = plain(STEPS, **options), ranks.run(_steps, torch.Size(shape).numel(), shape, backend, options)
    for got, _ in results:  # rows are the same bits, and one rank multiplies whole matrices as one process does
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    shards = shape[-1]
    for replica in range(0, len(results), shards):  # each matrix has one rank in every replica, and all have work
        dealt = [mine for _, mine in results[replica : replica + shards]]
        assert sorted(number for mine in dealt for number in mine) == list(range(len(MATRICES)))
        assert all(dealt)


def test_cost() -> None:
    for n, m in ((3, 7), (7, 3)):
        assert newton_schulz_cost((n, m)) == 3 * 7 * 3 + 3 * 3 * 3 + 3 * 3 * 7, "X X^T, its square, and that times X"


def _save(rank: int, world: int, folder: Path, shape: tuple[int, ...]) -> None:
    model, optimizer = sharded(shape, "cpu")
    step_on(model, optimizer, range(3))
    Checkpoints(folder, keep=1).save(model=model, optimizer=optimizer, state={}, step=3)


def _resume(rank: int, world: int, folder: Path, shape: tuple[int, ...]) -> tuple[dict, list]:
    model, optimizer = sharded(shape, "cpu-sharded", seed=9, lr=0.5, nesterov=False)
    checkpoints = Checkpoints(folder, keep=1)
    checkpoints.load(checkpoints.newest(), model=model, optimizer=optimizer)
    groups = [{name: group[name] for name in ("lr", "weight_decay")} for group in optimizer.param_groups]
    return step_on(model, optimizer, range(3, 6)), groups


def test_a_copy_of_a_chain_steps_its_own_parameters() -> None:
    ones = [torch.ones(2, requires_grad=True) for _ in range(2)]
    chain = ChainedOptimizer(*(torch.optim.SGD([each], lr=1.0, momentum=0.5) for each in ones))
    copied = copy.deepcopy(chain)
    for optimizer, steps in ((chain, 1), (copied, 2)):
        for group in optimizer.param_groups:
            group["params"][0].grad = torch.ones(2)
        for _ in range(steps):
            optimizer.step()
    assert [group["params"][0].tolist() for group in chain.param_groups] == [[0.0, 0.0]] * 2
    assert [group["params"][0].tolist() for group in copied.param_groups] == [[-1.5, -1.5]] * 2
    assert len(copied.state) == 2


def test_a_chain_whose_optimizers_look_at_their_first_state_is_resumed() -> None:
    """Adagrad does, and SGD's has no step."""

    def made() -> ChainedOptimizer:
        first, second = ([torch.ones(2, requires_grad=True)] for _ in range(2))
        return ChainedOptimizer(torch.optim.SGD(first, lr=1.0, momentum=0.5), torch.optim.Adagrad(second, lr=0.25))

    def stepped(chain: ChainedOptimizer) -> list:
        for group in chain.param_groups:
            group["params"][0].grad = torch.ones(2)
        chain.step()
        return [group["params"][0].tolist() for group in chain.param_groups]

    chain, resumed = made(), made()
    before = stepped(chain)
    resumed.load_state_dict(copy.deepcopy(chain.state_dict()))
    for group, values in zip(resumed.param_groups, before, strict=True):
        group["params"][0].data = torch.tensor(values)
    assert stepped(resumed) == stepped(chain)
    assert [group["lr"] for each in resumed.optimizers for group in each.param_groups] == [1.0, 0.25]
    resumed.param_groups[1]["lr"] = 0.0
    assert resumed.optimizers[1].param_groups[0]["lr"] == 0.0
    copied = copy.deepcopy(resumed)
    assert stepped(copied) == stepped(resumed)
    assert all(each.state is copied.state for each in copied.optimizers)
    assert len(copied.state) == 2


def _state_dict(rank: int, world: int) -> dict[str, torch.Tensor]:
    """Through plain state dicts, from optimizers joined anew after a step, into new ones that have not stepped."""
    model, optimizer = sharded((world,), "cpu")
    step_on(model, optimizer, range(1))
    optimizer = ChainedOptimizer(*optimizer.optimizers)
    step_on(model, optimizer, range(1, 3))
    saved = optimizer.state_dict(), {name: value.full_tensor() for name, value in model.state_dict().items()}
    model, optimizer = sharded((world,), "cpu", seed=9, lr=0.5)
    optimizer.load_state_dict(saved[0])
    model.load_state_dict(saved[1])
    return step_on(model, optimizer, range(3, 6))


def test_a_state_dict_is_loaded() -> None:
    for got in ranks.run(_state_dict, 2):
        torch.testing.assert_close(got, plain(6), rtol=0, atol=0)  # the same bits, as above


def test_resumed_on_other_ranks(tmp_path: Path) -> None:
    want = plain(6)
    ranks.run(_save, 2, tmp_path, (2,))
    for shape in ((3,), (2, 2)):
        for got, groups in ranks.run(_resume, torch.Size(shape).numel(), tmp_path, shape):
            assert groups == [recorded.OPTIONS] * 2
            torch.testing.assert_close(got, want, rtol=0, atol=0)  # the same bits, as above


def _refusals(rank: int, world: int) -> dict[str, str]:
    model, other = (fully_shard(recorded.Matrices()) for _ in range(2))
    plain_model = recorded.Matrices()
    two_models = Muon([model.tall, other.tall])
    both = ChainedOptimizer(Muon([model.wide]), torch.optim.AdamW([model.bias]))
    wrong = {
        "all parameters": lambda: Muon(model.parameters()),
        "not sharded": lambda: Muon([plain_model.tall]),
        "two models": two_models.step,
        "a group": lambda: both.add_param_group({"params": [model.tall]}),
        "twice": lambda: ChainedOptimizer(Muon([model.tall]), torch.optim.AdamW([model.tall])),
        "none": ChainedOptimizer,
    }
    return {name: caught(call) for name, call in wrong.items()}


REFUSED = {
    "all parameters": r"^ValueError: Muon only supports 2D parameters, and bias has the size .7.: give it to another",
    "not sharded": r"^TypeError: a parameter of size \[13, 6\] was not sharded by odc_triton.fully_shard",
    "two models": "^ValueError: tall and tall belong to two sharded models: make one Muon for each",
    "a group": "^NotImplementedError: a group can't be added to ChainedOptimizer",
    "twice": "^ValueError: some parameters appear in more than one parameter group",
    "none": "^ValueError: ChainedOptimizer was given no optimizer",
}


def test_misuse_is_refused_by_name() -> None:
    compare(ranks.run(_refusals, 1)[0], REFUSED)


def _differing(rank: int, world: int, how: str) -> str:
    model, _ = sharded((world,), "cpu")
    matrices = [model.tall, model.wide] if how != "other matrices" or rank else [model.wide, model.tall]
    optimizer = Muon(matrices, ns_steps=4 if how == "options" and rank == 1 else 5)
    give_gradients(model, 0)
    if how == "gradients" and rank == 1:
        model.wide.grad = None
    return caught(optimizer.step)


DIFFERENCES = {
    "gradients": "other gradients",
    "options": "other hyperparameters",
    "other matrices": "hold other parameters: tall [13, 6]  against  wide [7, 10]",
}


def test_ranks_that_differ() -> None:
    found = ranks.run_all(2, *((_differing, how) for how in DIFFERENCES))
    for words, said in zip(DIFFERENCES.values(), found, strict=True):
        assert all(text.startswith("RanksDiffer: ") for text in said), said
        assert words in said[1]
