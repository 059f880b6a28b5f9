"""`odc_triton.run`: programs of FSDP2 that don't know of odc-triton."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard, register_fsdp_forward_method
from torch.optim import Optimizer

from bench.whole import whole
from odc_triton import minibatch, use_odc
from odc_triton.base.errors import RanksDiffer
from odc_triton.fsdp2.unmodified import Unmodified
from odc_triton.tools.cli import main
from tests.support import ranks
from tests.support.bridged import Branches, batches_of, count_of, loss_of, made, sharded
from tests.support.deadlines import LONG_S

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
    with Unmodified(timeout=LONG_S) as report:
        model = sharded()
        frozen = sharded().requires_grad_(False)
        _train(model, [[0, 1], []][rank])
        frozen(torch.ones(3, 6))
        offloaded = sharded(offload_policy=CPUOffloadPolicy(pin_memory=False))
        _train(offloaded, [rank])
        own = use_odc(sharded())
        with minibatch(own, tokens=1) as mb:
            (own(torch.ones(3, 6)).sum() / mb.tokens).backward()
    assert model._odc_engine.barrier.timeout_s == LONG_S
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
            "communication, 0 minibatches, 0 waits; Branches by plain FSDP2; Branches by the program's own use_odc"
        )
        plain = made(NAME, "")
        _train(plain, [0, 1], total=2)  # the mean over two ranks
        torch.testing.assert_close(weights, dict(plain.named_parameters()), rtol=1e-5, atol=1e-6)


class _Called(nn.Linear):
    """Counts calls, as transformers' layers check in theirs whether they are recomputed."""

    calls = 0

    def __call__(self, *given: Any) -> Any:
        self.calls += 1
        return super().__call__(*given)


class _Scored(Branches):
    def score(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward(x)


def _steps(model: nn.Module, forward: Any, batches: list[int], *, zeroes: bool = True) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for each in batches:
        for _ in range(each):
            forward(torch.ones(3, 6)).sum().backward()
        optimizer.step()
        if zeroes:
            optimizer.zero_grad()


def _others(rank: int, world: int) -> None:
    with Unmodified(strict=True) as report, pytest.raises(NotImplementedError, match="leave out offload_policy"):
        _train(sharded(offload_policy=CPUOffloadPolicy(pin_memory=False)), [rank])
    assert "by plain FSDP2" in str(report)

    synced = sharded()
    synced.set_requires_gradient_sync(False)
    with Unmodified() as report:
        _train(synced, [rank], count_of(NAME, batches_of(NAME, 0, 4)[0]))
    assert "2 minibatches, 4 waits" in str(report)

    with Unmodified() as report:
        own = fully_shard(_Called(6, 6))
        _steps(own, own, [1, 2 * rank])
        assert own.calls == 1 + 2 * rank
        with pytest.raises(RuntimeError, match=r"by odc_triton\.run or a plugin: leave one of them out"):
            Unmodified().__enter__()
    assert "2 minibatches" in str(report)

    with Unmodified() as report:  # a method that is registered, and a model whose root is not sharded
        scored = _Scored()
        for block in scored.blocks:
            fully_shard(block)
        fully_shard(scored)
        register_fsdp_forward_method(scored, "score")
        _steps(scored, scored.score, [1, 1], zeroes=False)
        parts = Branches()
        for block in parts.blocks:
            fully_shard(block)
        _steps(parts, parts, [1, 1])
    assert str(report) == "_Scored by plain FSDP2; _Branch by plain FSDP2"
    (_, registered), (_, rootless) = report.refused
    assert "a method of register_fsdp_forward_method runs first" in registered
    assert "units of Branches are sharded and it is not" in rootless

    with Unmodified() as report:  # rank 1 comes to the model by its own zero_grad
        zeroed = sharded()
        zeroed.zero_grad()
        _steps(zeroed, zeroed, [2, 1] if rank == 0 else [0, 1])
    assert "2 minibatches, 4 waits" in str(report)

    resumed = sharded()
    with mock.patch("odc_triton.fsdp2.unmodified.say") as said, Unmodified():
        torch.optim.SGD(resumed.parameters()).step()  # as DCP does, to load states, before the first forward
        said.assert_not_called()

    late = sharded()
    with Unmodified(), pytest.raises(RanksDiffer, match="optimizer steps before the first forward"):
        _steps(late, late, [1, 1] if rank == 0 else [0, 1], zeroes=False)


def test_what_is_converted_when_and_what_is_not() -> None:
    ranks.run(_others, 2)


ENDS = {  # of a program: its status, and the last line or lines
    "import sys; sys.exit(0)": ([], 0, "no model of FSDP2 ran in this process, so nothing was changed"),
    "raise SystemExit(3)": (["--strict"], 3, "no model of FSDP2 ran in this process, so nothing was changed"),
    "import torch; from torch.optim import SGD; SGD([torch.ones(1, requires_grad=True)]).step()": (
        [],
        0,
        "no model of torch's fully_shard has run before this first optimizer step: DDP and FSDP1 are left as they are, "
        "and accelerate uses FSDP2 on GPUs only\nodc-triton: no model of FSDP2 ran in this process, so nothing",
    ),
    "import os, sys; os.chdir('/'); open(__file__); assert os.getcwd() not in sys.path": ([], 0, "so nothing was"),
    # It dies with its parent: this is PR_GET_PDEATHSIG.
    "import ctypes; n = ctypes.c_int(); ctypes.CDLL(None).prctl(2, ctypes.byref(n)); raise SystemExit(n.value)": (
        [],
        signal.SIGKILL,
        "so nothing was changed",
    ),
}


def _as_main(folder: Path, flags: list[str]) -> None:
    """As `python -m odc_triton.run` begins, in a process that has imported torch."""
    os.chdir(folder)
    os.dup2(os.open("stderr", os.O_CREAT | os.O_WRONLY), sys.stderr.fileno())
    os.environ["TORCHELASTIC_RUN_ID"] = "as under torchrun"
    sys.path.insert(0, str(folder))
    sys.argv = ["", *flags, "program.py"]
    runpy.run_module("odc_triton.run", run_name="__main__", alter_sys=True)


def test_a_program_ends_as_by_python(tmp_path: Path) -> None:
    for number, (text, (flags, status, said)) in enumerate(ENDS.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "program.py").write_text(text)
        process = ranks.fork_server().Process(target=_as_main, args=(folder, flags))
        process.start()
        process.join(LONG_S)
        lines = (folder / "stderr").read_text()
        assert process.exitcode == status, f"{text}: {lines}"
        assert said in "\n".join(lines.splitlines()[-1 - said.count("\n") :]), text


def test_a_process_ends_as_by_python(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import sys; sys.exit()")
    command = [sys.executable, "-m", "odc_triton.run", "--strict", "program.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    said = "nothing was trained by on-demand communication, as --strict wants"
    assert said in done.stderr.splitlines()[-1]


def test_a_wrong_command_line_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "no_such_program.py"]) == 1
    assert "there is no file no_such_program.py" in capsys.readouterr().err
    assert main(["run", "--ranks", "0", str(EXAMPLE)]) == 1
    assert "--ranks is 0" in capsys.readouterr().err
    said = {"0": "it is 0; give more than 0 and at most a year", "an hour": "invalid minutes value: 'an hour'"}
    for minutes, words in said.items():
        with pytest.raises(SystemExit):
            main(["run", "--timeout-minutes", minutes, str(EXAMPLE)])
        assert f"--timeout-minutes: {words}" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_line() -> None:
    """The example's losses are FSDP2's, line by line."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [sys.executable, "-m", "odc_triton.tools.cli", "run", "--ranks", "2", "--strict", str(EXAMPLE)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    # Not `check`: torch 2.13's gloo sometimes aborts a rank that has printed all, as its process ends.
    plain = subprocess.run([*torchrun, str(EXAMPLE)], capture_output=True, text=True, env=environment)
    ours = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert ours.stdout == plain.stdout
    assert ours.stdout.count("loss") == 5
    last = ours.stderr.splitlines()[-1]
    assert last == "odc-triton: Qwen2ForCausalLM trained by on-demand communication, 5 minibatches, 10 waits"
