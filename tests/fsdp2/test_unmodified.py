"""`odc_triton.run`: programs of FSDP2 that don't know of odc-triton."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.optim import Optimizer

from bench.whole import whole
from odc_triton import minibatch, use_odc
from odc_triton.fsdp2.unmodified import Unmodified
from odc_triton.tools.cli import main
from tests.support import ranks
from tests.support.bridged import batches_of, count_of, loss_of, made, sharded

EXAMPLE = Path(__file__).parents[2] / "examples" / "fsdp2.py"
NAME = "both branches"


def _train(model: nn.Module, microbatches: list[int], total: int = 1, steps: int = 2) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        for each in microbatches:
            batch = batches_of(NAME, step, 4)[each]
            (loss_of(NAME, model, batch) * 2 / total).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()


def _trains(rank: int, world: int) -> tuple[str, dict[str, torch.Tensor]]:
    """The first model is FSDP2's, whose rank 1 has no microbatch in any step; others can't be, or are already."""
    before = vars(Optimizer)["zero_grad"]
    with Unmodified() as report:
        model = sharded()
        frozen = sharded().requires_grad_(False)
        _train(model, [[0, 1], []][rank])
        frozen(torch.ones(3, 6))
        offloaded = sharded(offload_policy=CPUOffloadPolicy(pin_memory=False))
        _train(offloaded, [rank])
        own = use_odc(sharded())
        with minibatch(own, tokens=1) as mb:
            (own(torch.ones(3, 6)).sum() / mb.tokens).backward()
    assert vars(Optimizer)["zero_grad"] is before
    assert "__call__" not in vars(FSDPModule)
    plain = sharded()
    _train(plain, [rank])
    assert not hasattr(plain, "_odc_engine")
    return str(report), {name: whole(each) for name, each in model.named_parameters()}


def test_models_train_by_odc_where_they_can_and_else_by_fsdp2() -> None:
    for report, weights in ranks.run(_trains, 2):
        assert report == (
            "Branches trained by on-demand communication, 2 minibatches, 4 waits; Branches ran by on-demand "
            "communication, 0 minibatches, 0 waits; Branches by plain FSDP2, as head.weight is offloaded "
            "to the CPU: leave out offload_policy"
        )
        plain = made(NAME, "")
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        for step in range(2):
            optimizer.zero_grad()
            for batch in batches_of(NAME, step, 4)[:2]:
                loss_of(NAME, plain, batch).backward()
            nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
            optimizer.step()
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(weights[name], parameter, rtol=1e-5, atol=1e-6)


def _is_strict(rank: int, world: int) -> None:
    with Unmodified(strict=True), pytest.raises(NotImplementedError, match="leave out offload_policy"):
        _train(sharded(offload_policy=CPUOffloadPolicy(pin_memory=False)), [rank])
    fsdp = sharded()
    with Unmodified() as report:
        fsdp.set_requires_gradient_sync(False)  # before it is anybody's
        _train(fsdp, [rank], count_of(NAME, batches_of(NAME, 0, 4)[0]))
    assert report.has_trained


def test_strict_raises() -> None:
    ranks.run(_is_strict, 2)


def test_a_wrong_command_line_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "no_such_program.py"]) == 1
    assert "there is no file no_such_program.py" in capsys.readouterr().err
    assert main(["run", "--ranks", "0", str(EXAMPLE)]) == 1
    assert "--ranks is 0" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_line() -> None:
    """The example's losses are FSDP2's, line by line."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [sys.executable, "-m", "odc_triton.tools.cli", "run", "--ranks", "2", "--strict", str(EXAMPLE)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    plain = subprocess.run([*torchrun, str(EXAMPLE)], capture_output=True, text=True, check=True, env=environment)
    ours = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert ours.stdout == plain.stdout
    assert ours.stdout.count("loss") == 5
    last = ours.stderr.splitlines()[-1]
    assert last == "odc-triton run: Qwen2ForCausalLM trained by on-demand communication, 5 minibatches, 10 waits"
