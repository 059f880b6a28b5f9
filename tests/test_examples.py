"""The examples run, each as its first lines say, and show what they claim."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from tests.support import ranks
from tests.support.deadlines import LONG_S

EXAMPLES = Path(__file__).parent.parent / "examples"
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}


def _run(example: str, world: int, *arguments: str) -> str:
    """What the example prints, on `world` ranks of torchrun."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    command = [sys.executable, *launcher, str(EXAMPLES / example), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG_S, env=os.environ | OFFLINE)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _numbers(word: str, text: str) -> list[float]:
    return [float(number) for number in re.findall(rf"\b{word} (-?[\d.]+)", text)]


def test_a_loss_of_ones_own() -> None:
    """On one rank as on two, as both take the same samples."""
    alone, together = ranks.run(_run_forked, 1, "own_loss.py"), ranks.run(_run_forked, 2, "own_loss.py")
    losses = _numbers("loss", alone[0])
    assert len(losses) == 5
    assert losses[-1] < losses[0] / 2
    assert _numbers("loss", together[0]) == pytest.approx(losses, abs=2e-3)  # printed with three digits


# ------------------------------------------------------------------ from FSDP2


@pytest.mark.parametrize(
    ("diff", "page", "new_lines"), [("fsdp2_to_odc", "from_fsdp2", 5), ("fsdp2_to_use_odc", "fsdp2_bridge", 6)]
)
def test_the_diff_turns_one_script_into_the_other(diff: str, page: str, new_lines: int, tmp_path: Path) -> None:
    file = EXAMPLES / f"{diff}.diff"
    lines = [line for line in file.read_text().splitlines() if line[:3] not in ("+++", "---")]
    assert sum(line.startswith("+") for line in lines) == new_lines
    assert sum(line.startswith("-") for line in lines) <= new_lines
    name = diff.removeprefix("fsdp2_to_") + ".py"
    (tmp_path / name).write_text((EXAMPLES / "fsdp2.py").read_text())
    subprocess.run(["git", "apply", "-p0", file], cwd=tmp_path, check=True, timeout=LONG_S)
    assert (tmp_path / name).read_text() == (EXAMPLES / name).read_text()
    assert file.read_text().rstrip() in (EXAMPLES.parent / "docs" / f"{page}.md").read_text()


def _run_forked(rank: int, world: int, example: str, *arguments: str) -> str:
    """As `_run`, by a rank of tests.support.ranks: without torchrun, and without importing torch again."""
    os.environ |= OFFLINE | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "OMP_NUM_THREADS": "1"}
    os.environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = "2"  # no loss of a minibatch is divided by it
    dist.init_process_group = lambda: None  # the group is there; accelerate takes it too
    sys.argv = [example, *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(EXAMPLES / example), run_name="__main__")
    return printed.getvalue()


def _plain_fsdp2() -> tuple[list[float], nn.Module]:
    """What examples/fsdp2.py computes, in one process and without sharding: each step's loss, and the model."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=4, num_key_value_heads=2))
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for step in range(5):
        generator = torch.Generator().manual_seed(step)
        sequences = [torch.randint(0, 256, (1, n), generator=generator) for n in (30, 7, 19, 64, 12, 25, 9, 41)]
        summed = sum(
            nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="sum") for ids in sequences
        )
        loss = summed / sum(ids.numel() - 1 for ids in sequences)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # one process reads what two saved
@pytest.mark.parametrize(
    ("example", "world"),
    [
        ("fsdp2.py", 2),
        ("use_odc.py", 3),  # 3, 3 and 2 sequences
        ("accelerate_fsdp2.py", 2),  # 3 and 5
    ],
)
def test_each_script_trains_as_a_plain_process(example: str, world: int, tmp_path: Path) -> None:
    losses, model = _plain_fsdp2()
    saved = [str(tmp_path)] if example.startswith("accelerate") else []
    printed = ranks.run(_run_forked, world, example, *saved)
    # The same update. Printed to 1e-6, and summed over ranks in another order.
    torch.testing.assert_close(_numbers("loss", printed[0]), losses, rtol=0, atol=3e-6)
    for folder in saved:
        read = {"model": {name: torch.zeros_like(value) for name, value in model.state_dict().items()}}
        dcp.load(read, checkpoint_id=Path(folder, "pytorch_model_fsdp_0"), no_dist=True)
        for name, value in model.named_parameters():
            # Five AdamW steps amplify the rounding of sums in another order where a gradient is near zero.
            assert (read["model"][name] - value).norm() <= 1e-5 * value.norm() + 1e-5, name


@pytest.mark.slow
@pytest.mark.parametrize("example", ["odc.py", "accelerate_fsdp2.py"])
def test_each_script_runs_as_its_first_line_says(example: str) -> None:
    torch.testing.assert_close(_numbers("loss", _run(example, 2)), _plain_fsdp2()[0], rtol=0, atol=3e-6)


@pytest.mark.slow
@pytest.mark.parametrize("example", ["loop.py", "replace_layers.py", "images.py"])
def test_the_blocks_of_the_readme_run(example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    losses = [_numbers("loss", _run(example, world)) for world in (1, 2)]
    assert losses[0]
    if example == "loop.py":  # both ranks print the loss of all
        assert (len(losses[0]), len(losses[1]), len(set(losses[1]))) == (3, 6, 3)
        assert (tmp_path / "out" / "model" / "config.json").exists()
    else:  # rank 0's first loss is the initial model's, on the same samples in either run
        assert set(losses[0][:1]) <= set(losses[1])


def test_a_rank_of_the_readmes_loop_may_have_no_microbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (EXAMPLES / "loop.py").read_text()
    assert text.count(" else (50,)") == 1
    (tmp_path / "loop.py").write_text(text.replace(" else (50,)", " else ()"))
    losses = [_numbers("loss", ranks.run(_run_forked, n, str(tmp_path / "loop.py"))[n - 1]) for n in (1, 2)]
    assert len(losses[0]) == 3
    assert losses[1] == pytest.approx(losses[0], abs=2e-3)  # printed with three digits


@pytest.mark.parametrize("torchrun", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_kernel_of_the_readme_runs(torchrun: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    printed = _run("linear_alone.py", 2) if torchrun else _run_alone(EXAMPLES / "linear_alone.py")
    assert _numbers("owns", printed) == ([25, 25] if torchrun else [50])
    assert max(_numbers("error", printed)) < 1e-5  # sums of 32 products in another order


# ------------------------------------------------------------------ TRL


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info < (3, 11), reason="TRL needs Python 3.11")
@pytest.mark.parametrize(
    ("example", "least_gain", "rel"),
    [
        ("trl_sft.py", 1.0, 1e-4),  # Adam's steps amplify the rounding of sums in another order
        ("trl_dpo.py", 0.29, 1e-3),
        ("grpo_trl.py", 0.15, None),  # a reward; ranks sample by their own random numbers, so the runs differ
    ],
)
def test_trl(example: str, least_gain: float, rel: float | None, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    found = []
    for world in (1, 2):
        printed = _run(example, world, str(tmp_path / str(world)))
        ((start, end),) = re.findall(r"(?:loss|reward) ([\d.]+) -> ([\d.]+);", printed)
        found.append((float(start), float(end)))
        gain = found[-1][0] - found[-1][1] if example.startswith("trl") else found[-1][1] - found[-1][0]
        assert gain > least_gain
        assert AutoModelForCausalLM.from_pretrained(tmp_path / str(world)).config.hidden_size == 64
    if rel is not None:
        assert found[1][0] == pytest.approx(found[0][0], rel=1e-6)
        assert found[1][1] == pytest.approx(found[0][1], rel=rel)


# ------------------------------------------------------------------ what runs alone


def _run_alone(script: Path) -> str:
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")} | OFFLINE
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=LONG_S, env=clean)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_evaluator() -> None:
    """It reads the policy that its job trains meanwhile."""
    printed = _run_alone(EXAMPLES / "evaluator.py")
    versions, losses = _numbers("version", printed), _numbers("loss", printed)
    assert len(versions) == 3
    assert versions == sorted(versions)
    assert max(losses) < 1.4, "it had half of the untrained loss, 2.8, before the evaluator came"


@pytest.mark.slow
def test_notebook(tmp_path: Path) -> None:
    cells = json.loads((EXAMPLES / "notebook.ipynb").read_text())["cells"]
    codes = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] for cell in cells if cell["cell_type"] == "code")
    (tmp_path / "notebook.py").write_text("\n".join(codes))
    printed = _run_alone(tmp_path / "notebook.py")
    start, end = map(float, re.findall(r"loss ([\d.]+) -> ([\d.]+)", printed)[0])
    assert end < start / 4
    assert "[40, 41, 42, 43, 44, 45, 46, 47, 48, 49]" in printed  # it has learned to count
