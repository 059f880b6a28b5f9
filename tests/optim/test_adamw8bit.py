"""8-bit AdamW on shards against bitsandbytes' own on each rank's rows: the same bits. Checkpoints on other ranks."""

from __future__ import annotations

import copy
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor, Shard

from odc_triton import fully_shard
from odc_triton.jobs.checkpoints.steps import Checkpoints
from odc_triton.optim import AdamW8bit, ChainedOptimizer, Muon, adamw8bit
from odc_triton.tools.memory.footprint import memory_plan
from tests.support import ranks, slow
from tests.support.refusals import caught, compare
from tests.support.replicas import mesh_of

# Rows that divide by no world, one with fewer rows than ranks, blocks that end within rows; then below 4096 elements.
LARGE = {"wide": (37, 300), "two_rows": (2, 4000), "tall": (5001, 3), "vector": (4099,), "never": (64, 65)}
SMALL = {"small": (13, 6), "bias": (7,), "empty": (0, 5)}
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True, strict=False)
OPTIONS = {"lr": 0.02, "weight_decay": 0.1, "betas": (0.8, 0.99)}


class Tensors(nn.Module):
    def __init__(self, seed: int = 1, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, shape in (LARGE | SMALL).items():
            setattr(self, name, nn.Parameter(torch.randn(shape, generator=generator).to(dtype)))


def _gradients(model: nn.Module, step: int) -> dict[str, torch.Tensor]:
    """This rank's rows; those of some blocks are zero, or a thousand times as large."""
    generator, found = torch.Generator().manual_seed(100 + step), {}
    for parameter in model._odc_engine.parameters:
        gradient = torch.randn(parameter.spec.shape, generator=generator)
        gradient[1:2], gradient[-1:] = 0, gradient[-1:] * 1000
        found[parameter.name] = parameter.shard.own_part(gradient.to(parameter.sharded.dtype))
    del found["never"]
    return found


def _sharded(shape: tuple[int, ...], seed: int = 1, dtype: torch.dtype = torch.float32, **options: Any) -> tuple:
    model = fully_shard(Tensors(seed, dtype), mesh=mesh_of(shape), backend="cpu")
    return model, AdamW8bit(model.parameters(), **OPTIONS | options)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> dict[str, torch.Tensor]:
    """Returns this rank's rows of the parameters after `steps`."""
    for step in steps:
        for name, gradient in _gradients(model, step).items():
            model.get_parameter(name).grad = gradient
        optimizer.step()
    return {name: p.detach().to_local().clone() for name, p in model.named_parameters()}


def _steps(rank: int, world: int, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes of this rank's states, after steps that are compared with bitsandbytes' on plain tensors of its rows."""
    import bitsandbytes

    adamw8bit._RUN = 1024  # several calls for a parameter
    model, optimizer = _sharded(shape, dtype=dtype)
    rows = {name: nn.Parameter(p.detach().to_local().clone()) for name, p in model.named_parameters()}
    plain = [
        bitsandbytes.optim.AdamW8bit([rows[name] for name in names], **OPTIONS, min_8bit_size=least)
        for names, least in ((LARGE, 0), (SMALL, 10**9))
    ]
    for step in range(6):
        for name, gradient in _gradients(model, step).items():
            rows[name].grad = gradient.to_local().clone() if rows[name].numel() else None
        for each in plain:
            each.step()
    torch.testing.assert_close(_step(model, optimizer, range(6)), rows, rtol=0, atol=0)
    state = [value for each in optimizer.state.values() for value in each.values()]
    return sum((value.to_local() if isinstance(value, DTensor) else value).nbytes for value in state)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((1,), torch.float32), ((3,), torch.bfloat16), slow((2,), torch.float32), slow((2, 2), torch.float32)],
)
def test_steps_are_those_of_bitsandbytes(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    replicas, each = (1, *shape)[-2:]
    found = ranks.run(_steps, replicas * each, shape, dtype)
    model = Tensors(dtype=dtype)
    del model.never  # has had no gradient, so no states
    plan = memory_plan(model, each, replicas=replicas, optimizer="adamw-8bit", backend="cpu")
    assert found[0] == plan.optimizer_state_bytes


def _states(model: nn.Module, optimizer: AdamW8bit) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """By parameter and state: its values, and the absmax of the block of each."""
    from bitsandbytes import functional

    found = {}
    for parameter in model._odc_engine.parameters:
        state = optimizer.state.get(parameter.sharded, {})
        for number in ("1", "2") if "absmax1" in state else ():
            codes, absmax = (state[f"{kind}{number}"].to_local() for kind in ("state", "absmax"))
            how = {"code": functional.create_dynamic_map(signed=number == "1"), "blocksize": 256}
            values = functional.dequantize_blockwise(codes, absmax=absmax.flatten(), **how)
            of_each = absmax.flatten().repeat_interleave(256)[: codes.numel()].view(codes.shape)
            wholes = (parameter.shard.as_dtensor(each).full_tensor() for each in (values, of_each))
            found[parameter.name + number] = tuple(wholes)
    return found


def _save(rank: int, world: int, folder: Path, shape: tuple[int, ...]) -> tuple[dict, dict]:
    model, optimizer = _sharded(shape)
    _step(model, optimizer, range(3))
    Checkpoints(folder, keep=1).save(model=model, optimizer=optimizer, state={}, step=3)
    whole = get_optimizer_state_dict(model, optimizer, options=WHOLE)
    if rank == 0:
        torch.save(whole, folder / "whole.pt")
    return _states(model, optimizer), _step(model, optimizer, range(3, 6))


def _resume(rank: int, world: int, folder: Path, shape: tuple[int, ...], same: bool) -> tuple[dict, dict, tuple]:
    import warnings

    model, optimizer = _sharded(shape, seed=9, lr=0.5)
    checkpoints = Checkpoints(folder, keep=1)
    with warnings.catch_warnings(record=True) as caught_here:
        warnings.simplefilter("always")
        checkpoints.load(checkpoints.newest(), model=model, optimizer=optimizer)
        other, by_torch = _sharded(shape, seed=9, lr=0.5)
        set_optimizer_state_dict(other, by_torch, torch.load(folder / "whole.pt"), options=WHOLE)
    said = any(
        "8-bit optimizer states were saved by another number of ranks" in str(each.message) for each in caught_here
    )
    assert said == (rank == 0 and not same)
    states, of_torch = _states(model, optimizer), _states(other, by_torch)  # torch's has some of all parameters
    torch.testing.assert_close({name: of_torch[name] for name in states}, states, rtol=0, atol=0)
    return states, _step(model, optimizer, range(3, 6)), optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [((2,), [(2,), (3,)]), slow((2, 2), [(2, 2), (4,), (1,), (3,)]), slow((1,), [(1,), (2,), (2, 2)])],
)
def test_resumed(tmp_path: Path, saved: tuple[int, ...], resumed: list[tuple[int, ...]]) -> None:
    from bitsandbytes import functional

    want = ranks.run(_save, torch.Size(saved).numel(), tmp_path, saved)
    assert len(want[0][0]) == 2 * len(LARGE) - 2
    for shape in resumed:
        found = ranks.run(_resume, torch.Size(shape).numel(), tmp_path, shape, shape == saved)
        for rank, (states, rows, lr) in enumerate(found):
            assert lr == OPTIONS["lr"]
            if shape == saved:
                torch.testing.assert_close(rows, want[rank][1], rtol=0, atol=0)
            for name, (values, absmax) in states.items():
                codes = functional.create_dynamic_map(signed=name.endswith("1"))
                before = (want[0][0][name][0] / absmax.clamp(min=1e-30)).clamp(codes[0], codes[-1])
                place = torch.searchsorted(codes, before).clamp(1, 255)
                now = values / absmax.clamp(min=1e-30)
                assert (codes[place - 1] - 1e-5 <= now).all(), name
                assert (now <= codes[place] + 1e-5).all(), name


def _state_dict(rank: int, world: int) -> None:
    """Beside Muon, with bf16 masters, through a plain state dict into optimizers that have not stepped."""

    def made(seed: int) -> tuple[nn.Module, ChainedOptimizer]:
        model, _ = _sharded((world,), seed, torch.bfloat16)
        others = [p for name, p in model.named_parameters() if name != "wide"]
        return model, ChainedOptimizer(Muon([model.wide]), AdamW8bit(others, **OPTIONS))

    model, optimizer = made(1)
    _step(model, optimizer, range(2))
    other, resumed = made(2)
    resumed.load_state_dict(resumed.state_dict())
    assert not resumed.state  # else checkpoints would be refused
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch would share tensors
    other.load_state_dict(model.state_dict())
    want = _step(model, optimizer, range(2, 4))
    torch.testing.assert_close(_step(other, resumed, range(2, 4)), want, rtol=0, atol=0)


def test_a_state_dict_is_loaded() -> None:
    ranks.run(_state_dict, 2)


def _refusals(rank: int, world: int, folder: Path) -> dict[str, str]:
    model, optimizer = _sharded((1,))
    _step(model, torch_adamw := torch.optim.AdamW(model.parameters()), range(1))
    checkpoints = Checkpoints(folder, keep=1)
    checkpoints.save(model=model, optimizer=torch_adamw, state={}, step=1)
    by_columns = DTensor.from_local(torch.zeros(64, 64), mesh_of((1,)), [Shard(1)])
    doubles = nn.Parameter(torch.zeros(5, dtype=torch.float64))
    sparse = nn.Embedding(3, 4, sparse=True)
    sparse(torch.tensor([1])).sum().backward()
    wrong = {
        "an option": lambda: AdamW8bit([{"params": [model.wide], "maximize": True}]),
        "an argument": lambda: AdamW8bit([model.wide], amsgrad=True),
        "columns": lambda: AdamW8bit([nn.Parameter(by_columns)]),
        "fp64": lambda: AdamW8bit([doubles]),
        "strides": lambda: AdamW8bit([nn.Parameter(torch.zeros(4, 3).t())]),
        "a group": lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))], "betas": (0.9, 1.0)}),
        "NaN": lambda: AdamW8bit([model.wide], eps=math.nan),
        "sparse": lambda: AdamW8bit(sparse.parameters()).step(),
        "AdamW's states": lambda: optimizer.load_state_dict(torch_adamw.state_dict()),
        "AdamW's": lambda: checkpoints.load(checkpoints.newest(), model=model, optimizer=optimizer),
    }
    said = {name: caught(call) for name, call in wrong.items()}
    assert len(optimizer.param_groups) == 1
    sys.modules["bitsandbytes.functional"] = None
    return said | {"no package": caught(lambda: AdamW8bit([model.wide]))}


REFUSED = {
    "an option": "^ValueError: AdamW8bit has no maximize: leave it out, or use torch.optim.AdamW",
    "an argument": "^TypeError: .*unexpected keyword argument 'amsgrad'",
    "columns": r"^TypeError: a parameter of size \[64, 64\] is torch.float32, placed \[S.*1.*split by rows",
    "fp64": r"^TypeError: a parameter of size \[5\] is torch.float64, .*takes fp32, bf16 and fp16",
    "strides": r"^TypeError: .*strides \(1, 3\): .*contiguous",
    "a group": r"^ValueError: .*'betas': \(0.9, 1.0\).*betas must be below 1",
    "NaN": r"^ValueError: AdamW8bit was given .*'eps': nan",
    "sparse": r"^RuntimeError: AdamW8bit takes dense gradients, not torch.sparse_coo",
    "AdamW's states": r"^ValueError: the state dict has step, exp_avg, exp_avg_sq for .*not of this AdamW8bit",
    "AdamW's": "^CheckpointDiffers: .*exp_avg of wide is not in this AdamW8bit",
    "no package": r'^ImportError: .*needs bitsandbytes; run: pip install "odc-triton\[quantize\]"',
}


def test_misuse_is_refused_by_name(tmp_path: Path) -> None:
    compare(ranks.run(_refusals, 1, tmp_path)[0], REFUSED)
