"""A mixture's routers' auxiliary losses in `train sft`, against plain transformers on one sample a microbatch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from odc_triton.balance import MinibatchSampler
from odc_triton.jobs.data.tokenizer import load_tokenizer
from odc_triton.jobs.train.model import build_model
from odc_triton.jobs.train.sft_options import SftOptions
from tests.hf.test_router_loss import plain_losses
from tests.support import jobs
from tests.support.families import causal_lm
from tests.support.sft_case import QWEN2, VOCABULARY, case, write_case
from tests.train.test_features import data

WEIGHT, STEPS, LR = 0.5, 3, 1e-2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_case(tmp_path_factory.mktemp("routers"))
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": 256, "sliding_window": None}
    causal_lm("Mixtral", **sizes).save_pretrained(folder / "mixture")
    return folder


def _options(folder: Path, **changes: object) -> SftOptions:
    usual = {"init": None, "model": str(folder / "mixture"), "steps": STEPS, "samples_per_rank": 2, "optimizer": "sgd"}
    return case(folder, **usual | {"lr": LR, "schedule": "constant", "warmup_steps": 0} | changes)


def _plain(folder: Path) -> tuple[nn.Module, list[tuple[float, float]]]:
    """The model after SGD's steps, and at each the loss and the auxiliary loss."""
    model, samples, seen = AutoModelForCausalLM.from_pretrained(folder / "mixture").train(), data(folder), []
    for packs in [*MinibatchSampler(samples.lengths.tolist(), 4, 256, rank=0, world=1)][:STEPS]:
        taken = [samples[index] for pack in packs for index in pack]
        taken = [{name: sample[name].tolist() for name in ("input_ids", "labels")} for sample in taken]
        losses = [plain_losses(model, sample) for sample in taken]
        tokens = sum(label != -100 for sample in taken for label in sample["labels"][1:])
        loss, router = sum(each for each, _ in losses) / tokens, sum(each for _, each in losses) / len(taken)
        (loss + WEIGHT * router).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= LR * parameter.grad
        model.zero_grad()
        seen.append((loss.item(), router.item()))
    return model, seen


def test_as_plain_transformers(folder: Path) -> None:
    """Here with packs from a queue, experts read from their owners; by default nothing is added."""
    outs = {weight: folder / str(weight) for weight in (WEIGHT, None)}
    layers = {"replace_layers": True, "expert_cache": 2**20}
    runs = [
        _options(folder, out=str(out), router_aux_loss=weight, balance="queue", steps=STEPS if weight else 1, **layers)
        for weight, out in outs.items()
    ]
    assert jobs.run(2, *runs) == [jobs.ENDED] * len(runs)
    plain, seen = _plain(folder)
    start = AutoModelForCausalLM.from_pretrained(folder / "mixture")
    lines, (off,) = map(jobs.lines, outs.values())
    for line, (loss, router) in zip(lines, seen, strict=True):
        assert line["loss"] == pytest.approx(loss, rel=1e-5)
        assert line["aux_loss"] == pytest.approx(router, rel=1e-5)
    trained = AutoModelForCausalLM.from_pretrained(outs[WEIGHT] / "model")
    assert trained.config.router_aux_loss_coef == WEIGHT
    for found, want, before in zip(trained.parameters(), plain.parameters(), start.parameters(), strict=True):
        assert (found - want).norm() <= 1e-3 * (want - before).norm() + 1e-7 * want.norm()
    assert off["loss"] == pytest.approx(lines[0]["loss"], rel=1e-5)
    assert off["grad_norm"] != pytest.approx(lines[0]["grad_norm"], rel=1e-4)
    assert "aux_loss" not in off


@pytest.mark.parametrize(
    ("config", "changes", "words"),
    [
        (
            "mixtral",
            {"split_sequences": True},
            "coef=0.5.*, a mean over full samples: leave --split-sequences out, or",
        ),
        ("qwen2", {}, "--router-aux-loss: Qwen2ForCausalLM has no router's auxiliary loss: leave it out"),
        ("mixtral", {"router_aux_loss": 0.0, "split_sequences": True}, None),
    ],
    ids=str,
)
def test_refused(folder: Path, tmp_path: Path, config: str, changes: dict, words: str | None) -> None:
    """As the command does before ranks start."""
    made = QWEN2 | {"model_type": config, "router_aux_loss_coef": 0.1, "output_router_logits": True}
    if config == "qwen2":
        made = QWEN2
    (tmp_path / "config.json").write_text(json.dumps(made | {"num_local_experts": 3}))
    options = case(folder, **{"init": str(tmp_path / "config.json"), "router_aux_loss": WEIGHT} | changes)
    taken = {"longest": 64, "largest_token": 9, "rank": 1}
    if words is None:
        assert not build_model(options, load_tokenizer(options.tokenizer), **taken)[0].config.output_router_logits
    else:
        with pytest.raises(ValueError, match=words):
            build_model(options, load_tokenizer(options.tokenizer), **taken)
