"""docs/after_training.md as it stands, on a small run: what lm-eval and llama.cpp compute is what transformers does."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.docs.test_tutorials import ROOT, blocks
from tests.programs.harness import interpreter, script
from tests.support.deadlines import LONG_S
from tests.support.sft_case import write_case


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the page's blocks have run, after a run that it does not show."""
    python, folder = interpreter("after-training"), tmp_path_factory.mktemp("after-training")
    (folder / "llama.cpp").symlink_to(python.parents[1] / "llama.cpp")
    write_case(folder, records=8).joinpath("data.jsonl").rename(folder / "held_out.jsonl")
    commands = [
        f"python {script('small_qwen2.py')} llama.cpp/models/ggml-vocab-qwen2.gguf base",
        "odc-triton train sft --data held_out.jsonl --model base --out out/run --ranks 2 --steps 2 --samples-per-rank 2"
        " --lr 0.01 --warmup-steps 0",
    ]
    for block in blocks(ROOT / "docs" / "after_training.md"):
        if block["file"]:
            (folder / block["file"]).parent.mkdir(exist_ok=True)
            (folder / block["file"]).write_text(block["text"])
        elif block["kind"] == "bash":
            commands.append(block["text"])
    paths = {"PATH": f"{python.parent}:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    for command in [*commands, f"python {script('llama_cpp.py')} out/model.gguf 'Apache License' >out/said.json"]:
        words = ["bash", "-euo", "pipefail", "-c", command]
        done = subprocess.run(words, cwd=folder, env=os.environ | paths, capture_output=True, text=True, timeout=LONG_S)
        assert done.returncode == 0, command + done.stdout + done.stderr
    return folder


def _log_probs(folder: Path, ids: list[int]) -> torch.Tensor:
    """Of each token but the first, by plain transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder / "out/run/model", dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def test_lm_eval(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder / "out/run/model")
    samples = [json.loads(line) for line in next(folder.glob("out/eval/*/samples_*")).read_text().splitlines()]
    assert len(samples) == 8
    for sample in samples[:3]:
        prompt, completion = sample["doc"]["prompt"], sample["doc"]["completion"] + tokenizer.eos_token
        learned = _log_probs(folder, tokenizer(prompt + completion).input_ids)[len(tokenizer(prompt).input_ids) - 1 :]
        assert float(sample["resps"][0][0][0]) == pytest.approx(learned.sum().item(), rel=1e-5)  # fp32, other batches


def test_gguf(folder: Path) -> None:
    said = json.loads((folder / "out/said.json").read_text())
    prompt = AutoTokenizer.from_pretrained(folder / "out/run/model")("Apache License").input_ids
    expected = _log_probs(folder, [*prompt, *said["ids"]])[len(prompt) - 1 :]
    torch.testing.assert_close(torch.tensor(said["log_probs"]), expected, rtol=0, atol=1e-4)  # fp32, other sums
