"""Evaluation, epochs, adapters, precision, the report: what a run does beside its steps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from odc_triton.jobs.data.dataset import DataOptions, SampleSubset, TokenizedDataset, split_samples
from odc_triton.jobs.data.tokenizer import TextEncoder, load_tokenizer
from odc_triton.jobs.train.sft import train_sft
from odc_triton.tools.cli.command import main
from tests.support import jobs
from tests.support.sft_case import case, write_case
from tests.support.tokenized import tokenize_file


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_case(tmp_path_factory.mktemp("features"))


@pytest.fixture(scope="module")
def runs(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders of runs on two ranks, by what is special about them."""
    outs = tmp_path_factory.mktemp("runs")
    changes = {
        "evaluated": {"eval_fraction": 0.25, "eval_every": 2},
        "by epochs": {"samples_per_rank": 4, "steps": None, "epochs": 1.6},
    }
    wanted = [case(folder, out=str(outs / name), **{"samples_per_rank": 2} | each) for name, each in changes.items()]
    assert jobs.run(2, *wanted) == [jobs.ENDED] * len(wanted)
    return {name: outs / name for name in changes}


def data(folder: Path) -> TokenizedDataset:
    encoder = TextEncoder.of(load_tokenizer(folder / "tokenizer.json"))
    return tokenize_file(folder / "data.jsonl", encoder, DataOptions(max_tokens=256, too_long="truncate"))


def plain_loss(model: nn.Module, samples: TokenizedDataset | SampleSubset) -> float:
    """Mean loss over all targets, one sample at a time."""
    total, targets = 0.0, 0
    for index in range(len(samples)):
        sample = samples[index]
        ids, labels = (torch.from_numpy(sample[name]) for name in ("input_ids", "labels"))
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0, :-1]
        total += nn.functional.cross_entropy(logits, labels[1:], ignore_index=-100, reduction="sum").item()
        targets += int((labels[1:] != -100).sum())
    return total / targets


def test_evaluation(folder: Path, runs: dict[str, Path]) -> None:
    seen = jobs.lines(runs["evaluated"])
    assert [line["step"] for line in seen if "eval_loss" in line] == [2, 4, 5]
    learned, held = split_samples(data(folder), 0.25, seed=0)
    assert (len(learned), len(held)) == (30, 10)
    model = AutoModelForCausalLM.from_pretrained(runs["evaluated"] / "model")
    # Packs sum in another order than single samples do.
    assert seen[-1]["eval_loss"] == pytest.approx(plain_loss(model, held), rel=1e-5)


def test_evaluation_changes_nothing(folder: Path, tmp_path: Path) -> None:
    """In a world of one, so to the bit."""
    dropout = write_case(tmp_path / "case", config={"model_type": "gpt2", "resid_pdrop": 0.1})
    runs: list[list[dict]] = []
    for every in (1, 0):
        wanted = case(dropout, out=str(tmp_path / f"{every}"), steps=4, eval_data=str(folder / "data.jsonl"))
        runs.append([])
        with mock.patch("odc_triton.jobs.train.outcome.can_draw", return_value=False):
            last = train_sft(replace(wanted, eval_every=every), runs[-1].append)
        assert runs[-1][-1] == last
        assert jobs.lines(wanted.out) == json.loads(json.dumps(runs[-1]))
    assert [line["loss"] for line in runs[0]] == [line["loss"] for line in runs[1]]
    assert sum("eval_loss" in line for line in runs[0]) == 4
    assert runs[0][-1]["eval_loss"] == runs[1][-1]["eval_loss"]


def test_epochs(runs: dict[str, Path]) -> None:
    seen = jobs.lines(runs["by epochs"])
    assert [line["epoch"] for line in seen] == pytest.approx([step / 5 for step in range(1, 9)])
    assert seen[-1]["lr"] < seen[2]["lr"], "the schedule ends where the run does"


# PEFT reads a property of transformers that has a new name now.
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_adapters(folder: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder / "config.json")
    base = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    base.save_pretrained(tmp_path / "base")
    wanted = {"init": None, "model": str(tmp_path / "base"), "out": str(tmp_path / "out"), "samples_per_rank": 2}
    wanted |= {"steps": 4, "lr": 1e-2, "lora_rank": 4, "lora_targets": "q_proj,v_proj", "gradient_checkpointing": True}
    layers = {"replace_layers": True, "fused_head": True}
    wanted = case(folder, **wanted | layers, eval_data=str(folder / "data.jsonl"), checkpoint_every=4)
    assert jobs.run(2, wanted) == [jobs.ENDED]
    seen = jobs.lines(wanted.out)
    assert seen[-1]["loss"] < seen[0]["loss"]
    samples = data(folder)
    untrained = plain_loss(base, samples)
    adapted = PeftModel.from_pretrained(base, tmp_path / "out" / "adapter")
    trained = plain_loss(adapted, samples)
    assert trained < untrained - 0.01
    # The run evaluated on the same samples, in packs.
    assert seen[-1]["eval_loss"] == pytest.approx(trained, rel=1e-5)
    adapters = [name for name, _ in adapted.named_parameters() if "lora_" in name]
    assert all("q_proj" in name or "v_proj" in name for name in adapters)
    assert len(adapters) == 8
    assert not (tmp_path / "out" / "model").exists()
    exported = tmp_path / "exported"
    assert main(["export", str(tmp_path / "out"), "--out", str(exported)]) == 0
    tokenizers = [path / "tokenizer.json" for path in (exported, tmp_path / "out" / "adapter")]
    assert tokenizers[0].read_bytes() == tokenizers[1].read_bytes()
    weights, config = "adapter_model.safetensors", "adapter_config.json"
    assert (exported / weights).read_bytes() == (tmp_path / "out" / "adapter" / weights).read_bytes()
    its, want = (json.loads((path / config).read_text()) for path in (exported, tmp_path / "out" / "adapter"))
    assert its | {"target_modules": sorted(its["target_modules"])} == want | {
        "target_modules": sorted(want["target_modules"])
    }
    command = ["export", str(tmp_path / "out" / "checkpoints"), "--model", str(tmp_path / "base"), "--merge"]
    assert main([*command, "--out", str(tmp_path / "merged")]) == 0
    got = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert plain_loss(got, samples) == pytest.approx(trained, rel=1e-5)


def test_bf16_and_the_report(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    wanted = case(folder, out=str(out), samples_per_rank=2, steps=6, dtype="bf16")
    assert jobs.run(2, wanted, draws=True) == [jobs.ENDED]
    seen = jobs.lines(out)
    assert seen[-1]["loss"] < seen[0]["loss"]
    page = (out / "report.html").read_text()
    assert page.count("<img ") == 2
    assert "3 barriers per step, for its start, its end, loss and norm" in page
    assert f"<dt>--data</dt><dd>{folder / 'data.jsonl'}</dd>" in page, "as typed"
    assert "6 steps over" in page
    assert f"{seen[-1]['loss']:.4f}" in page
    trace = json.loads((out / "trace.json").read_text())
    spans = trace["traceEvents"] if isinstance(trace, dict) else trace
    assert {span["tid"] for span in spans if span.get("ph") == "X"} == {1, 2}, "the timelines of both ranks"
    assert all(0 <= line["idle"] <= 1 for line in seen)
