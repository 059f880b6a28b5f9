"""`--teacher`: supervised fine-tuning against plain torch on one process, with TRL's divergence; wrong teachers."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from odc_triton.balance import MinibatchSampler
from odc_triton.jobs.data.dataset import DataOptions
from odc_triton.jobs.data.tokenizer import TextEncoder, load_tokenizer, to_transformers
from odc_triton.jobs.train import sft
from odc_triton.jobs.train.metrics import read_metrics
from odc_triton.jobs.train.sft_options import SftOptions
from odc_triton.packs.collate import count_target_tokens, pack_collate
from tests.support import jobs
from tests.support.models import tie_in_config
from tests.support.sft_case import LICENSE, QWEN2, VOCABULARY, case, write_case
from tests.support.tokenized import tokenize_file
from tests.train.test_features import plain_loss

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="TRL needs Python 3.11")

STEPS = 3
MODELS = {"start": {}, "tied": {}, "teacher": {"hidden_size": 48}, "padded": {"vocab_size": VOCABULARY + 20}}
FRACTION = 1e-4  # of what the steps changed: fp32, sums in another order


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a model, start/, a wider teacher/, and two that only their config ties: tied/, and padded/, which has the
    model's tokenizer and more rows.
    """
    folder = write_case(tmp_path_factory.mktemp("teacher"), records=40, characters=200)
    for seed, (name, changes) in enumerate(MODELS.items()):
        save(folder / name, seed, changes)
    for tied in ("tied", "padded"):
        tie_in_config(folder / tied)
    to_transformers(load_tokenizer(folder / "tokenizer.json")).save_pretrained(folder / "padded")
    return folder


def save(at: Path, seed: int, changes: dict[str, Any]) -> None:
    torch.manual_seed(seed)
    config = AutoConfig.for_model(**QWEN2 | changes, initializer_range=0.2)  # distributions that are far from even
    AutoModelForCausalLM.from_config(config).save_pretrained(at)


def options(folder: Path, out: Path, **changes: Any) -> SftOptions:
    usual = {"init": None, "model": str(folder / "start"), "teacher": str(folder / "teacher"), "out": str(out)}
    changes |= {"teacher": str(folder / changes["teacher"])} if changes.get("teacher") in MODELS else {}
    usual |= {"optimizer": "sgd", "lr": 0.5, "schedule": "constant", "warmup_steps": 0, "steps": STEPS}
    return case(folder, **usual | {"samples_per_rank": 4, "clip_norm": 1e9} | changes)


def plain(folder: Path, wanted: SftOptions) -> tuple[list[float], list[float], float, dict[str, torch.Tensor]]:
    """Losses and divergences per token, of eight samples a step, and the final cross-entropy of all, and weights."""
    with mock.patch.dict(os.environ, TRL_EXPERIMENTAL_SILENCE="1"):
        from trl.experimental.gkd import GKDTrainer

    model, teacher = (AutoModelForCausalLM.from_pretrained(each) for each in (wanted.model, wanted.teacher))
    encoder = TextEncoder.of(load_tokenizer(wanted.tokenizer))
    data = tokenize_file(folder / "data.jsonl", encoder, DataOptions(max_tokens=256))
    sampler = MinibatchSampler(data.lengths.tolist(), 8, 256, rank=0, world=1, drop_last=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=wanted.lr)
    how = {"beta": wanted.teacher_beta, "temperature": wanted.teacher_temperature, "reduction": "sum"}
    losses, apart = [], []
    for _, packs in zip(range(STEPS), sampler, strict=False):
        samples = pack_collate([[data[index]] for pack in packs for index in pack])
        total = count_target_tokens(samples)
        found = []
        for sample in samples:
            ids, labels = sample["input_ids"], sample["labels"]
            with torch.no_grad():
                theirs = teacher(input_ids=ids).logits[:, :-1]
            own = model(input_ids=ids).logits[:, :-1]
            theirs = theirs[..., : own.shape[-1]]
            divergence = GKDTrainer.generalized_jsd_loss(own, theirs, labels=labels[:, 1:], **how)
            loss = wanted.teacher_weight * divergence
            loss = loss + (1 - wanted.teacher_weight) * F.cross_entropy(own[0], labels[0, 1:], reduction="sum")
            (loss / total).backward()
            found.append((loss.item() / total, divergence.item() / total))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(loss for loss, _ in found))
        apart.append(sum(divergence for _, divergence in found))
    return losses, apart, plain_loss(model, data), model.state_dict()


def test_steps_are_plain_torchs(folder: Path, tmp_path: Path) -> None:
    """With the labels, at a temperature; a teacher whose vocabulary is padded, and both models tied by their config."""
    how = {
        "teacher_beta": 0.3,
        "teacher_temperature": 1.5,
        "teacher_weight": 0.75,
        "eval_data": str(folder / "data.jsonl"),
    }
    wanted = options(folder, tmp_path / "out", model=str(folder / "tied"), teacher="padded", **how)
    assert jobs.run(2, wanted) == [jobs.ENDED]
    first = load_file(folder / "tied" / "model.safetensors")
    losses, apart, evaluated, weights = plain(folder, wanted)
    found = read_metrics(tmp_path / "out" / "metrics.jsonl")
    assert [line["loss"] for line in found] == pytest.approx(losses, rel=1e-5)
    assert [line["divergence"] for line in found] == pytest.approx(apart, rel=1e-5)
    assert found[-1]["eval_loss"] == pytest.approx(evaluated, rel=1e-5)
    assert apart[-1] < apart[0]
    for key, value in load_file(tmp_path / "out" / "model" / "model.safetensors").items():
        moved = (weights[key] - first[key]).norm()
        assert moved > 0, key
        assert (weights[key] - value).norm() < FRACTION * moved, key


@pytest.mark.filterwarnings("ignore:.*the config ties")  # of padded/
def test_wrong_teachers_are_refused_before_the_start(folder: Path, tmp_path: Path) -> None:
    save(tmp_path / "other", 2, {"vocab_size": 400})
    save(tmp_path / "short", 2, {"max_position_embeddings": 16})
    (tmp_path / "empty").mkdir()
    for teacher in ("padded", "teacher"):  # the latter has no tokenizer
        sft.check_before_start(options(folder, tmp_path / "out", teacher=teacher), 2)
    for at, said in {
        tmp_path / "other": "has a vocab_size of 400 and the model one of 300, and no tokenizer",
        tmp_path / "short": "short: the longest sample has .* tokens and the model takes at most 16",
        tmp_path / "empty": "empty",
        LICENSE: "LICENSE",
    }.items():
        with pytest.raises((OSError, ValueError), match=said):
            sft.check_before_start(options(folder, tmp_path / "out", teacher=str(at)), 2)
