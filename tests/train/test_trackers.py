"""Trackers: what each is told of a run that goes on, and ones that fail, hang or outlive their rank."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from odc_triton.base import environment
from odc_triton.jobs.train.sft import check_before_start
from odc_triton.jobs.train.sft_options import SftOptions
from odc_triton.jobs.train.trackers import Trackers, chosen, require_trackers
from tests.support import jobs, logged
from tests.support.deadlines import LONG_S
from tests.support.sft_case import case, write_case

STEPS, STOP, SAVED = 6, 4, 2
TURNS = ((0, 0, (1, 2)), (1, 2, (2, 3)))  # the step that it starts after, the last that is logged, those that it logs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_case(tmp_path_factory.mktemp("trackers"))
    held_out = (folder / "data.jsonl").read_text().splitlines()[:3]
    (folder / "held_out.jsonl").write_text("".join(line + "\n" for line in held_out))
    return folder


def test_a_resumed_run_is_one_chart(folder: Path, tmp_path: Path) -> None:
    """In TensorBoard. Stopped after step 4, and resumed from step 2: steps 3 and 4 are taken again."""
    out = tmp_path / "my run"
    held_out = {"eval_data": str(folder / "held_out.jsonl"), "eval_every": 2}
    how = {"steps": STEPS, "samples_per_rank": 2, "checkpoint_every": SAVED, "resume": "auto"}
    wanted = case(folder, out=str(out), report_to=("tensorboard",), **how, **held_out)
    assert jobs.run(2, wanted, stop_after=STOP - 1) == [jobs.STOPPED]
    shutil.rmtree(out / "checkpoints" / f"step-{STOP:08d}")
    assert jobs.run(2, wanted) == [jobs.ENDED]
    lines = jobs.lines(out)
    scalars, texts = logged.in_tensorboard(out / "tensorboard")
    for name in {name for line in lines for name in line} - {"step"}:
        want = [(line["step"], float(np.float32(line[name]))) for line in lines if line.get(name) is not None]
        assert scalars[name] == want, name
    assert "samples_per_rank" in texts["options/text_summary"][0]
    assert f"{STEPS} steps over" in texts["final/text_summary"][-1]


def log(started: Trackers, steps: tuple[int, int], more: dict[str, Any], again: float = 0.0) -> None:
    """Two steps and a sample, of step 3 also the end. `again`: what a step's loss has more where it is taken again."""
    for step in steps:
        started.log({"step": step, "loss": 0.5 * step + again} | more)
    started.log_samples([{"step": steps[-1], "prompt": "a", "reward": float("nan")}])
    if steps[-1] == 3:
        started.finish({"step": 3, "loss": 1.5 + again}, "in words")


@pytest.mark.parametrize(
    ("name", "stopped", "reinit"),
    [("wandb", [{"exit_code": 1}], "create_new"), ("trackio", [{}], None), ("swanlab", ["aborted", {}], True)],
)
def test_steps_of_a_run_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, stopped: list, reinit: object
) -> None:
    """Two steps were logged, and the run goes on after step 1."""
    out = tmp_path / "my run"
    out.mkdir()
    options = SftOptions(data="d", init="i", tokenizer="t", out=str(out), report_to=(name,), run_group="sweep")
    found = []
    for place, (step, seen, steps) in enumerate(TURNS):
        package = logged.Recorder(tmp_path / f"{place}.jsonl")
        monkeypatch.setitem(sys.modules, name, package)
        started = Trackers(options, ranks=2, step=step, seen=seen)
        log(started, steps, {"eval_loss": None, "grad_norm": float("nan")})
        started.close(within_s=LONG_S)
        found.append(package.calls())
    first, second = found
    assert [call[0] for call in first] == ["init", "log", "log", "log", "finish"]
    made, again = first[0][1], second[0][1]
    assert (made["project"], made["name"], made["config"]["ranks"]) == ("odc-triton", "my run", 2)
    assert made["group"] == "sweep"
    assert made.get("reinit") == reinit
    assert first[1:4] == [
        ["log", 1, {"loss": 0.5}],
        ["log", 2, {"loss": 1.0}],
        ["log", 2, {"samples": [["step", "prompt", "reward"], [2, "a", None]]}],
    ]
    assert first[4] == ["finish", *stopped]
    assert again["resume"] == "allow"
    assert again.get("id") == (None if name == "trackio" else "an-id")
    logs = [call for call in second if call[0] == "log" and "loss" in call[2]]
    assert [(step, line["loss"]) for _, step, line in logs] == [(3, 1.5)], "it keeps what was logged first"
    assert "in words" in json.dumps(second)
    assert second[-1] == ["finish", {}]


@pytest.mark.filterwarnings("ignore")  # their own
@pytest.mark.parametrize("name", ["mlflow", "swanlab"])
def test_with_their_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any, name: str) -> None:
    """As above, with MLflow's database and SwanLab's files."""
    package, out = pytest.importorskip(name), tmp_path / "my run"
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/runs.db")
    monkeypatch.chdir(tmp_path)  # MLflow's artifacts
    out.mkdir()
    options = SftOptions(data="d", init="i", tokenizer="t", out=str(out), report_to=(name,))
    ids = []
    for step, seen, steps in TURNS:
        started = Trackers(options, ranks=2, step=step, seen=seen)
        log(started, steps, {"reward/a:b": 1.0}, again=step)
        (tracker,) = started._running
        started.close(within_s=LONG_S)
        assert not tracker.problem
        ids.append((out / name / "run-id").read_text())
        if name == "mlflow":
            assert package.get_run(ids[0]).info.status == ("FINISHED" if step else "KILLED")
    assert ids[0] == ids[1]
    if name == "mlflow":
        run = package.get_run(ids[0])
        assert run.data.params["ranks"] == "2"
        assert "in words" in run.data.tags["mlflow.note.content"]
        history = package.MlflowClient().get_metric_history(ids[0], "loss")
        assert [(each.step, each.value) for each in history] == [(1, 0.5), (2, 1.0), (3, 2.5)]
        assert len(package.artifacts.list_artifacts(run_id=ids[0], artifact_path="samples")) == 2
    else:
        assert len([*out.glob(f"swanlab/run-*-{ids[0]}/*.swanlab")]) == 2
        assert "ERROR" not in "".join(capfd.readouterr())


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Starts trackers whose wandb is another module."""
    options = SftOptions(data="d", init="i", tokenizer="t", out=str(tmp_path), report_to=("wandb",))

    def start(init: Any) -> Trackers:
        monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Table=None))
        return Trackers(options, ranks=1)

    return start


def test_one_that_raises_is_reported_once(fake: Any, capsys: pytest.CaptureFixture) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    started = fake(lambda **_: SimpleNamespace(id="x", offline=False, log=fail))
    (tracker,) = started._running
    started.log({"step": 7, "loss": 1.0})
    tracker._thread.join(LONG_S)
    started.log({"step": 8, "loss": 1.0})
    started.finish({"step": 9, "loss": 1.0}, "words")
    started.close()
    said = "[Errno 28] No space left on device\n"
    assert capsys.readouterr() == (
        f"wandb was off since step 7; metrics.jsonl has all steps: {said}",
        f"odc-triton: wandb is off since step 7, and the run continues without it: {said}",
    )


def test_one_that_hangs(fake: Any, capsys: pytest.CaptureFixture) -> None:
    """It is left at the end, and keeps a bounded queue."""
    answers = threading.Event()
    started = fake(lambda **_: answers.wait(LONG_S))
    (first,) = started._running
    started.finish({"step": 1, "loss": 1.0}, "words")
    started.close(within_s=0.1)
    said = "odc-triton: wandb had not logged all steps 0.1 s after the end; metrics.jsonl has them\n"
    assert capsys.readouterr().err.startswith(said)

    started = fake(lambda **_: answers.wait(LONG_S))
    (tracker,) = started._running
    for step in range(1, 10_001):
        started.log({"step": step, "loss": 1.0})
    assert not tracker.problem
    started.log({"step": 10_001, "loss": 1.0})
    assert tracker._calls.qsize() == 10_000
    started.close(within_s=LONG_S)  # it is not waited for
    answers.set()
    for each in (first, tracker):
        each._thread.join(LONG_S)
        assert not each._thread.is_alive()
    assert "it is slower than the run, and 10000 calls wait for it" in capsys.readouterr().err


def test_one_that_is_not_installed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    assert {*chosen(("all", "wandb"))} >= {"tensorboard", "wandb", "trackio"}
    monkeypatch.setattr(environment, "version", version)
    with pytest.raises(ImportError, match=r"--report-to all, and none of tensorboard, .*swanlab is installed; run"):
        require_trackers(("all",))
    with pytest.raises(
        ImportError, match=r'--report-to trackio needs trackio; run: pip install "odc-triton\[trackio\]"'
    ):
        check_before_start(case(folder, report_to=("trackio",)), 1)
