"""The SFT loop on real text (a few records): against plain torch, and independent of how samples are assigned."""

from __future__ import annotations

import dataclasses
import json
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from odc_triton import full_parameters
from odc_triton.balance import MinibatchSampler
from odc_triton.hf import enable_packing
from odc_triton.jobs.data.dataset import DataOptions, TokenizedDataset
from odc_triton.jobs.data.tokenizer import TextEncoder, load_tokenizer
from odc_triton.jobs.options.config_file import read_config, write_config
from odc_triton.jobs.options.options import read_options
from odc_triton.jobs.train.job import _sharded
from odc_triton.jobs.train.model import build_model, replace
from odc_triton.jobs.train.optimizers import make_schedule
from odc_triton.jobs.train.sft_options import SftOptions
from odc_triton.jobs.train.sft_run import SftRun
from odc_triton.nn import LMHead
from odc_triton.packs.collate import count_target_tokens, pack_collate
from odc_triton.plan.cost import CostModel
from odc_triton.plan.decoder import Decoder
from odc_triton.plan.order import Mix
from odc_triton.sharding.agree import default_mesh
from odc_triton.sharding.backend import CpuBackend
from odc_triton.sharding.shard_module import fully_shard
from odc_triton.tools.tune import save
from tests.support import ranks
from tests.support.sft_case import QWEN2, case, write_case
from tests.support.tokenized import tokenize_file

STEPS = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_case(tmp_path_factory.mktemp("sft"), records=120, characters=300)
    encoder = TextEncoder.of(load_tokenizer(folder / "tokenizer.json"))
    tokenize_file(folder / "data.jsonl", encoder, DataOptions(max_tokens=256)).save(folder / "data.npz")
    return folder


def options(folder: Path, **changes: object) -> SftOptions:
    return case(folder, **{"steps": STEPS, "truncate": False} | changes)


def _model() -> nn.Module:
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**QWEN2))
    enable_packing(model)
    return model.train()


def train(rank: int, world: int, jobs: list[SftOptions], folder: Path) -> list[tuple[list[float], dict, dict]]:
    found = []
    for wanted in jobs:
        model = _model()
        replace(model, wanted, rank)
        data, cost = TokenizedDataset.load(folder / "data.npz"), CostModel.paper_7b()
        prepared: Any = SimpleNamespace(data=data, evaluation=None, mix=Mix((len(data),)), identity={})
        run = SftRun(options=wanted, model=fully_shard(model), teacher=None, prepared=prepared, cost=cost)
        losses = [run.train_step()["loss"] for _ in range(wanted.steps)]
        found.append((losses, dict(full_parameters(run.model)), run.state.sampler))
    return found


@pytest.fixture(scope="module")
def of_plain_torch(folder: Path) -> tuple[list[float], dict]:
    """Losses and weights of plain torch, one sample a microbatch, eight a minibatch: the same samples."""
    wanted = options(folder)
    torch.set_num_threads(1)
    model = _model()
    data = TokenizedDataset.load(folder / "data.npz")
    sampler = MinibatchSampler(data.lengths.tolist(), 8, 256, rank=0, world=1, drop_last=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=wanted.lr, weight_decay=0.0)
    losses, factor_at = [], make_schedule(wanted, wanted.steps)
    for step, packs in zip(range(wanted.steps), sampler, strict=False):
        samples = pack_collate([[data[index]] for pack in packs for index in pack])
        total = count_target_tokens(samples)
        for group in optimizer.param_groups:
            group["lr"] = wanted.lr * factor_at(step)
        summed = 0.0
        for sample in samples:
            logits = model(input_ids=sample["input_ids"], use_cache=False).logits[0, :-1]
            loss = nn.functional.cross_entropy(logits, sample["labels"][0, 1:], ignore_index=-100, reduction="sum")
            (loss / total).backward()
            summed += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(summed / total)
    return losses, {name: p.detach() for name, p in model.named_parameters()}


CASES = ({}, {"balance": "micro", "replace_layers": True, "fused_head": True}, {"balance": "global"})


def test_equals_plain_torch_however_samples_are_dealt(folder: Path, of_plain_torch: tuple[list[float], dict]) -> None:
    jobs = [options(folder, **changes) for changes in CASES]
    want_losses, want = of_plain_torch
    norm = sum(value.norm() ** 2 for value in want.values()).sqrt()
    for of_rank in ranks.run(train, 2, jobs, folder):
        for changes, (losses, weights, position) in zip(CASES, of_rank, strict=True):
            assert losses == pytest.approx(want_losses, rel=1e-5, abs=0), changes
            # Packs sum in another order than single samples; AdamW amplifies it over the steps.
            assert sum((weights[k] - want[k]).norm() ** 2 for k in want).sqrt() < 1e-5 * norm, changes
            assert position["minibatch"] == STEPS
    assert want_losses[-1] < want_losses[0]


def test_attention_is_planned_by_its_measured_cost(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    wanted = options(folder)
    prepared = SimpleNamespace(tokenizer=load_tokenizer(wanted.tokenizer), longest=256, largest_token=9)
    mesh = default_mesh(timedelta(minutes=1))
    monkeypatch.setenv("ODC_TUNED", str(tmp_path))
    model, by_flops = _sharded(wanted, prepared=prepared, mesh=mesh)
    words = Decoder.of(model.config).words
    save(CpuBackend().place([None]), [], tmp_path, {f"float32: {words}": 1.5, f"bfloat16: {words}": 9.0})
    _, cost = _sharded(wanted, prepared=prepared, mesh=mesh)
    assert (cost.quadratic, cost.linear) == (1.5 * by_flops.quadratic, by_flops.linear)
    said = capsys.readouterr().out
    assert said.count("attention is planned by its measured cost, 1.50 of its FLOPs'\n") == 1


def test_split_sequences_fuse_the_head_where_they_can_and_compute_in_chunks(
    folder: Path, capsys: pytest.CaptureFixture
) -> None:
    def built(**changes: object) -> tuple[bool, bool]:
        wanted = options(folder, **changes)
        model, _ = build_model(wanted, load_tokenizer(wanted.tokenizer), longest=256, largest_token=9, rank=0)
        return isinstance(model.lm_head, LMHead), "forward" in vars(model.model.layers[0].mlp)

    assert built() == (False, False)
    assert built(fused_head=True) == (True, False)
    with pytest.raises(ValueError, match=r"--expert-cache: .*config\.json has no experts to replace"):
        built(replace_layers=True, expert_cache=9)
    capsys.readouterr()
    assert built(split_sequences=True) == (True, True)
    assert built(split_sequences=True, fused_head=False) == (False, True)
    assert capsys.readouterr().out == ""
    model = _model()
    model.lm_head = nn.Linear(32, 300)
    replace(model, options(folder, split_sequences=True), rank=0, try_head=True)
    said = "logits are computed whole, as the head can't be fused (lm_head: it has a bias)\n"
    assert capsys.readouterr().out == said


def test_command_trains_and_exports(folder: Path, tmp_path: Path) -> None:
    wanted = options(folder, out=str(tmp_path / "out"), truncate=True)
    write_config(tmp_path / "given.yaml", wanted, comment="the run", ranks=1)
    command = ["train", "sft", "--config", str(tmp_path / "given.yaml"), "--ranks", "2", "--fused-head"]
    status, printed, problems = ranks.command(*command)
    assert status == 0, problems
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert "\r" not in problems, "lines, and no bar, where there is no terminal"
    assert "5/5" in problems
    size = f"{sum(each.numel() for each in _model().parameters()):,}"
    warms = "2 of them warm-up (--warmup-steps is 2)"
    said = f"{size} of {size} parameters, ranks: 2 (cpu), fp32, steps: 5, {warms}, checkpoints: every 10 minutes\n"
    assert said in printed
    written = read_config(tmp_path / "out" / "run.yaml", SftOptions, ranks=int)
    assert written.pop("ranks") == 2
    assert read_options(SftOptions, written) == dataclasses.replace(wanted, fused_head=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model")
    assert type(model).__name__ == "Qwen2ForCausalLM"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out" / "model")
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id is not None
    ids = torch.tensor([tokenizer("def main():\n    return 0\n")["input_ids"]])
    trained = model(input_ids=ids).logits
    assert trained.isfinite().all()
