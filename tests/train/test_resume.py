"""Stopping and going on: the losses are those of the run that was never stopped."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from odc_triton.train.metrics import MetricsFile, read_metrics
from odc_triton.train.sft_options import SftOptions
from tests.support import jobs
from tests.support.jobs import ENDED, STOPPED, losses
from tests.support.sft_case import case, write_case

STEPS = 7
ACROSS_RANKS = 1e-5  # gradients are added in the order of their arrival


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # With dropout, so that the random numbers count.
    return write_case(tmp_path_factory.mktemp("resume"), config={"model_type": "gpt2", "resid_pdrop": 0.1})


def options(folder: Path, out: Path, **changes: object) -> SftOptions:
    """Without dropout, whose random numbers another number of ranks deals otherwise."""
    init = folder / "without-dropout.json"
    return case(folder, **{"init": str(init), "out": str(out), "steps": STEPS, "samples_per_rank": 2} | changes)


@pytest.fixture(scope="module")
def whole(folder: Path) -> Path:
    """A run on two ranks that nothing stopped."""
    assert jobs.run(2, options(folder, folder / "whole")) == [ENDED]
    return folder / "whole"


def test_goes_on_with_other_replicas(folder: Path, tmp_path: Path, whole: Path) -> None:
    """Four ranks in two replicas, then two ranks, each of which has the whole model."""
    out = tmp_path / "out"
    wanted = options(folder, out, resume="auto", replicas=2)
    assert jobs.run(4, replace(wanted, samples_per_rank=1), stop_after=1) == [STOPPED]
    assert len(losses(out)) == 2
    assert [path.name for path in (out / "checkpoints").glob("step-*")] == ["step-00000002"]
    assert jobs.run(2, wanted) == [ENDED]
    torch.testing.assert_close(losses(out), losses(whole), rtol=ACROSS_RANKS, atol=0)
    got, want = (load_file(each / "model" / "model.safetensors") for each in (out, whole))
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=0, atol=1e-5)


def test_resume_from_a_folder_into_another(folder: Path, tmp_path: Path) -> None:
    """On one rank, so to the bit, with dropout."""
    init = str(folder / "config.json")
    one = options(folder, tmp_path / "a", init=init, samples_per_rank=4, checkpoint_every=4)
    other = replace(one, out=str(tmp_path / "b"), resume=str(tmp_path / "a" / "checkpoints" / "step-00000004"))
    report = tmp_path / "a" / "report.html"
    assert jobs.run(1, one, other, replace(one, resume="auto")) == [ENDED] * 3
    assert "No step was taken" not in report.read_text(), "a run that ended is started again: its report stays"
    lines = read_metrics(tmp_path / "b" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [5, 6, 7]
    assert [line["loss"] for line in lines] == losses(tmp_path / "a")[4:]


def test_other_options_are_named(folder: Path, tmp_path: Path) -> None:
    wanted = options(folder, tmp_path / "out", steps=2)
    other = replace(wanted, resume="auto", lr=2e-3, samples_per_rank=4)
    three = replace(wanted, out=str(tmp_path / "three"), replicas=3)
    ended, started_anew, differs, not_split = jobs.run(2, wanted, wanted, other, three)
    assert ended == ENDED
    assert started_anew.startswith("FileExistsError")
    assert "--resume auto" in started_anew
    assert "--lr was 0.001 and is 0.002" in differs
    assert "samples per step was 4 and is 8" in differs
    assert "steps" not in differs.replace("samples_per_step", "")
    assert "2 ranks can't be split into 3 equal replicas: give a divisor of 2" in not_split


def test_metrics_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, step=0)
    for step in (1, 2, 3):
        file.write({"step": step, "loss": float("nan") if step == 2 else 0.5})
    file.close()
    with open(path, "ab") as torn:
        torn.write(b'{"step": 4, "lo')
    file = MetricsFile(path, step=2)
    file.write({"step": 3, "loss": 0.25})
    assert read_metrics(path) == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": None}, {"step": 3, "loss": 0.25}]
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]
    for damaged in ('{"step": "one"}', "[]", '{"ste'):
        (tmp_path / "damaged.jsonl").write_text(f'{{"step": 1}}\n{damaged}\n')
        with pytest.raises(ValueError, match=r"damaged.jsonl, line 2 is not the metrics of a step: remove it"):
            read_metrics(tmp_path / "damaged.jsonl")
    shutil.move(path, tmp_path / "elsewhere")
    with pytest.raises(OSError, match=r"can't be written \(No such file.*--resume auto"):
        file.write({"step": 4, "loss": 0.1})
    file.close()
