"""The examples run, each as its first lines say, and show what they claim."""

from __future__ import annotations

import contextlib
import csv
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
from tests.support.models import build

EXAMPLES = Path(__file__).parent.parent / "examples"
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}


def _run(example: str, world: int, *arguments: str) -> str:
    """What the example prints, on `world` ranks of torchrun."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    command = [sys.executable, *launcher, str(EXAMPLES / example), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=os.environ | OFFLINE)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _numbers(word: str, text: str) -> list[float]:
    return [float(number) for number in re.findall(rf"\b{word} (-?[\d.]+)", text)]


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
    subprocess.run(["git", "apply", "-p0", file], cwd=tmp_path, check=True, timeout=60)
    assert (tmp_path / name).read_text() == (EXAMPLES / name).read_text()
    assert file.read_text().rstrip() in (EXAMPLES.parent / "docs" / f"{page}.md").read_text()


def _run_forked(rank: int, world: int, example: str, *arguments: str) -> str:
    """As `_run`, by a rank of tests.support.ranks: without torchrun, and without importing torch again."""
    os.environ |= OFFLINE | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "OMP_NUM_THREADS": "1"}
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
        ("torchtitan_loop.py", 2),  # 3 and 5
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
@pytest.mark.parametrize("example", ["odc.py", "use_odc.py", "accelerate_fsdp2.py", "torchtitan_loop.py"])
def test_each_script_runs_as_its_first_line_says(example: str) -> None:
    torch.testing.assert_close(_numbers("loss", _run(example, 2)), _plain_fsdp2()[0], rtol=0, atol=3e-6)


# ------------------------------------------------------------------ GRPO


def _completions(seed: int = 0) -> list:
    from examples.grpo_step import Completion, group_advantages

    generator = torch.Generator().manual_seed(seed)
    advantages = group_advantages(torch.rand(2, 4, generator=generator)).flatten().tolist()
    made = []
    for advantage in advantages:
        n, prompt = (int(torch.randint(2, 12, (), generator=generator)) for _ in range(2))
        made.append(
            Completion(
                ids=torch.randint(97, (prompt + n,), generator=generator).tolist(),
                prompt_tokens=prompt,
                advantage=advantage,
                # Off the policy by enough that some ratios are clipped; random weights give each word about 1/97.
                old_logp=-4.6 + 0.4 * torch.randn(n, generator=generator),
                ref_logp=-4.6 + 0.4 * torch.randn(n, generator=generator),
            )
        )
    return made


def _grpo(rank: int, world: int, dealt: list[list[list[int]]], kl: float, fused: bool) -> tuple[dict, dict]:
    from examples.grpo_step import grpo_step
    from odc_triton import full_parameters, fully_shard, replace_layers
    from odc_triton.hf import enable_packing

    model = build("qwen2").train()
    enable_packing(model)
    if fused:
        assert replace_layers(model, roles=["head"], verbose=False).swapped["head"]
    model = fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    completions = _completions()
    packs = [[completions[index] for index in pack] for pack in dealt[rank]]
    metrics = grpo_step(model, optimizer, packs, kl=kl, clip_norm=0.5)
    return metrics, dict(full_parameters(model))


def _plain_grpo(kl: float) -> tuple[dict, nn.Module]:
    """The equations of the example, token by token, on a whole model and each completion by itself."""
    model = build("qwen2").train()
    completions = _completions()
    tokens = sum(len(c.old_logp) for c in completions)
    loss, outside = torch.zeros(()), 0
    for c in completions:
        ids = torch.tensor(c.ids)
        words = model(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
        for i in range(len(c.old_logp)):
            t = c.prompt_tokens + i
            logp = words[t - 1, ids[t]]
            ratio = torch.exp(logp - c.old_logp[i])
            clipped = min(max(ratio, torch.tensor(0.8)), torch.tensor(1.2))
            outside += int(not 0.8 <= ratio <= 1.2)
            behind = c.ref_logp[i] - logp
            loss = loss - min(ratio * c.advantage, clipped * c.advantage) + kl * (behind.exp() - behind - 1)
    (loss / tokens).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    return {
        "loss": loss.item() / tokens,
        "outside": outside / tokens,
        "grad_norm": norm.item(),
        "tokens": tokens,
    }, model


@pytest.mark.parametrize(
    ("kl", "fused", "dealt"),
    [
        (0.0, False, [[[0, 1, 2], [3, 4], [5]], [[6, 7]]]),
        (0.1, True, [[[0, 1, 2, 3, 4, 5], [6, 7]], []]),
    ],
)
def test_a_grpo_step(kl: float, fused: bool, dealt: list) -> None:
    want, model = _plain_grpo(kl)
    assert 0 < want["outside"] < 1  # both sides of the clipping are there
    start = dict(build("qwen2").named_parameters())
    for rank, (got, weights) in enumerate(ranks.run(_grpo, 2, dealt, kl, fused)):
        # The order of fp32 sums differs, and a ratio is the exponential of a difference of log-probabilities.
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)
        for name, value in model.named_parameters():
            step, wanted = weights[name] - start[name], value - start[name]
            # A weight of about 0.02 minus its old value: a unit in its last place is 1e-9, steps are 1e-3.
            assert (step - wanted).norm() <= 1e-4 * wanted.norm() + 1e-7, f"rank {rank}: {name}"


@pytest.mark.slow
def test_grpo_learns() -> None:
    printed = [_run("grpo_step.py", world) for world in (1, 2)]
    chances = [_numbers("chance of an even token", text)[0] for text in printed]
    assert chances[0] > 0.55  # from 0.5
    # Eight Adam steps amplify the rounding of sums in another order; printed to 1e-3.
    assert abs(chances[0] - chances[1]) < 2e-3
    assert _numbers("tokens", printed[0]) == _numbers("tokens", printed[1])


# ------------------------------------------------------------------ SFT


@pytest.mark.slow
def test_tracker(tmp_path: Path) -> None:
    from odc_triton.data.tokenizer import save_tokenizer, train_tokenizer

    records = [{"prompt": f"{n} plus one?", "completion": f" It is {n + 1}."} for n in range(40)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    tokenizer = train_tokenizer((r["prompt"] + r["completion"] for r in records), vocab_size=280)
    save_tokenizer(tokenizer, tmp_path / "tokenizer.json")
    config = {"model_type": "qwen2", "vocab_size": 280, "hidden_size": 32, "intermediate_size": 48}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    chosen = {"data": "data.jsonl", "init": "config.json", "tokenizer": "tokenizer.json", "out": "run"}
    arguments = [word for name, value in chosen.items() for word in (f"--{name}", str(tmp_path / value))]
    numbers = ["--steps", "4", "--samples-per-rank", "4", "--token-cap", "128", "--tracker", str(tmp_path / "tracker")]
    _run("tracker.py", 2, *arguments, *numbers)
    with open(tmp_path / "tracker" / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    logged = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [float(row["loss"]) for row in rows] == [metrics["loss"] for metrics in logged]
    assert len(rows) == 4


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info < (3, 11), reason="TRL needs Python 3.11")
def test_trl(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    losses = [re.findall(r"loss ([\d.]+) -> ([\d.]+);", _run("trl_sft.py", n, str(tmp_path / str(n)))) for n in (1, 2)]
    ((start, end),), ((start_2, end_2),) = losses
    assert float(end) < float(start) - 1
    # Twelve Adam steps amplify the rounding of sums in another order.
    assert float(start_2) == pytest.approx(float(start), rel=1e-6)
    assert float(end_2) == pytest.approx(float(end), rel=1e-4)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "2").config.hidden_size == 64


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info < (3, 11), reason="TRL needs Python 3.11")
def test_trl_grpo(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    for world in (1, 2):  # ranks sample by their own random numbers, so the runs differ
        printed = _run("grpo_trl.py", world, str(tmp_path / str(world)))
        start, end = map(float, re.findall(r"reward ([\d.]+) -> ([\d.]+);", printed)[0])
        assert start < 0.55  # half of the words are even
        assert end > start + 0.15
        assert AutoModelForCausalLM.from_pretrained(tmp_path / str(world)).config.hidden_size == 64


# ------------------------------------------------------------------ the notebook


@pytest.mark.slow
def test_notebook(tmp_path: Path) -> None:
    cells = json.loads((EXAMPLES / "notebook.ipynb").read_text())["cells"]
    codes = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] for cell in cells if cell["cell_type"] == "code")
    script = tmp_path / "notebook.py"
    script.write_text("\n".join(codes))
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=200, env=clean | OFFLINE)
    assert done.returncode == 0, done.stderr
    start, end = map(float, re.findall(r"loss ([\d.]+) -> ([\d.]+)", done.stdout)[0])
    assert end < start / 4
    assert "[40, 41, 42, 43, 44, 45, 46, 47, 48, 49]" in done.stdout  # it has learned to count
