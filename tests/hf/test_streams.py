"""ODCTrainer on data sets without a length, against transformers' own Trainer on one process and the same stream."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset
from transformers import Trainer

from odc_triton.base.errors import RanksDiffer
from odc_triton.hf import ODCTrainer
from odc_triton.jobs.trainers.streams import StreamedSteps
from tests.support import ranks
from tests.support.models import build
from tests.support.trainer_case import (
    STEPS,
    Streamed,
    arguments,
    assert_weights_alike,
    logs,
    pad,
    samples,
    sharded_model,
    targets,
    weights_of,
)

COUNT = 10  # steps of 4 samples, 4 and 2, then again from the first
SAVING = {"save_strategy": "steps", "save_steps": 1}


class Stream(IterableDataset):
    """The first samples; each epoch begins at another one."""

    def __init__(self, count: int = COUNT, first: int = 0) -> None:
        self.count, self.epoch, self.first = count, 0, first

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        given = samples()[: self.count]
        for index in range(self.count):
            yield given[(index + self.epoch + self.first) % self.count]


class Anew:
    """Samples of one length whose tokens are drawn at each access, on each rank."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"input_ids": [3 + next(DRAWN) % 90 for _ in range(8)]}


DRAWN = count(os.getpid())


def _steps(drop_last: bool = False) -> list[list[dict[str, list[int]]]]:
    found, stream = [], Stream()
    for epoch in range(STEPS):
        stream.set_epoch(epoch)
        given = list(stream)
        found += [given[at : at + 4] for at in range(0, COUNT - 3 if drop_last else COUNT, 4)]
    return found[:STEPS]


def _trained(
    rank: int, world: int, folder: str, stream: Any, resume: str | None = None, **changes: Any
) -> dict[str, Any]:
    """What a run leaves; a step has 4 samples whatever the world."""
    tokens = []

    class Counted(ODCTrainer):
        def training_step(self, model: Any, inputs: Any, *more: Any) -> torch.Tensor:
            tokens.append(sum(pack["input_ids"].numel() for pack in inputs))
            return super().training_step(model, inputs, *more)

    evaluated = {name: changes.pop(name) for name in ("eval_dataset",) if name in changes}
    args = arguments(folder, **{"per_device_train_batch_size": 4 // world} | changes)
    trainer = Counted(sharded_model(seed=9 if resume else 0), args, train_dataset=stream, **evaluated)
    trainer.train(resume_from_checkpoint=resume)
    found = {key: logs(trainer, key) for key in ("loss", "target_tokens")}
    return found | {"weights": weights_of(trainer.model), "tokens": tokens}


def _each(rank: int, world: int, folder: str) -> dict[str, Any]:
    found = {"whole": _trained(rank, world, f"{folder}/whole", Stream(), **SAVING)}
    with pytest.raises(RanksDiffer, match="rank 1 has other samples than rank 0: give every rank the same data set"):
        _trained(rank, world, f"{folder}/other", Stream(first=rank))
    with pytest.raises(RanksDiffer, match="rank 1 has other samples than rank 0"):
        _trained(rank, world, f"{folder}/seeds", [*islice(Stream(), 12)], seed=rank)
    equal = [{"input_ids": [3 + i] * 8} for i in range(16)]
    for what, given, changes in (
        ("train_dataset", equal[rank::world], {}),
        ("eval_dataset", Stream(), {"eval_dataset": {"all": equal, "mine": equal[rank::world]}}),
    ):
        with pytest.raises(RanksDiffer, match=f"rank 1 has other samples than rank 0: give every rank the same {what}"):
            _trained(rank, world, f"{folder}/equal", given, **changes)
    _trained(rank, world, f"{folder}/anew", Anew(), max_steps=1)
    evaluates = ODCTrainer(
        sharded_model(), arguments(f"{folder}/named"), train_dataset=equal, eval_dataset={"mine": equal[rank::world]}
    )
    with pytest.raises(RanksDiffer, match="give every rank the same eval_dataset"):
        evaluates.evaluate("mine")
    return found


def _plain(folder: Path, data: Any) -> Any:
    plain = Trainer(
        build("qwen2"), arguments(str(folder / "plain"), use_cpu=True), train_dataset=data, data_collator=pad
    )
    plain.train()
    return plain


def _assert_alike(result: dict[str, Any], plain: Any) -> None:
    assert result["target_tokens"] == [targets(step) for step in _steps()]
    torch.testing.assert_close(result["loss"], logs(plain, "loss"), rtol=1e-5, atol=0)
    assert_weights_alike(result["weights"], {name: value.detach() for name, value in plain.model.named_parameters()})


def test_as_plain(tmp_path: Path) -> None:
    """Two ranks, and one that goes on from their second step."""
    plain = _plain(tmp_path, Stream())
    results = [each["whole"] for each in ranks.run(_each, 2, str(tmp_path))]
    checkpoint = f"{tmp_path}/whole/checkpoint-2"
    for step, of_ranks in zip(_steps(), zip(*(each["tokens"] for each in results), strict=True), strict=True):
        lengths = [len(sample["input_ids"]) for sample in step]
        assert sum(of_ranks) == sum(lengths)
        assert max(of_ranks) - min(of_ranks) < max(lengths)
    results.append(_trained(0, 1, f"{tmp_path}/resumed", Stream(), checkpoint, **SAVING))
    for result in results:
        _assert_alike(result, plain)


def test_steps_of_a_stream() -> None:
    """Those of an epoch that are not full stay or go; a stream that can be read once ends."""
    for drop_last in (False, True):
        found = StreamedSteps(Stream(), 4, drop_last=drop_last)
        assert [step for step, _ in zip(found, range(STEPS), strict=False)] == _steps(drop_last)
    assert list(StreamedSteps(Streamed(iter(samples()[:COUNT])), 4, drop_last=False)) == _steps()[:3]
