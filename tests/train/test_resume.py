"""Stopping and going on: the losses are those of the run that was never stopped."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from odc_triton.base.errors import CheckpointFailed
from odc_triton.comm.barrier import Barrier
from odc_triton.jobs.checkpoints.steps import Checkpoints
from odc_triton.jobs.train import loop
from odc_triton.jobs.train.metrics import MetricsFile, read_metrics
from odc_triton.jobs.train.run_folder import RunFolder
from odc_triton.jobs.train.save_clock import SaveClock
from odc_triton.jobs.train.sft_options import SftOptions
from tests.support import jobs, ranks
from tests.support.jobs import ENDED, losses
from tests.support.sft_case import case, write_case

STEPS = 7


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # With dropout, so that the random numbers count.
    return write_case(tmp_path_factory.mktemp("resume"), config={"model_type": "gpt2", "resid_pdrop": 0.1})


def options(folder: Path, out: Path, **changes: object) -> SftOptions:
    """Without dropout, whose random numbers another number of ranks deals otherwise."""
    init = folder / "without-dropout.json"
    return case(folder, **{"init": str(init), "out": str(out), "steps": STEPS, "samples_per_rank": 2} | changes)


def _state(out: Path) -> dict[str, tuple[int, int]]:
    """Which files a run's folder has: a file that was written again has another inode or time."""
    files = [path for path in out.rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(out)): (path.stat().st_ino, path.stat().st_mtime_ns) for path in files}


def _changed(before: dict, after: dict) -> set[str]:
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


def _in_turn(rank: int, world: int, jobs_of: dict[str, SftOptions], out: Path) -> dict[str, tuple]:
    """How each job ended, what it changed in the folder `out`, and what it printed; on one rank."""
    found = {}
    for name, wanted in jobs_of.items():
        before = _state(out)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            (ended,) = jobs.train(rank, world, [wanted])
        found[name] = ended, _changed(before, _state(out)), printed.getvalue()
    return found


def test_a_run_forgets_nothing(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Started again it is left as it is, unless it shall be longer; its checkpoint begins another run. To the bit."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "moved").mkdir()
    shutil.copy(folder / "config.json", tmp_path / "moved" / "config.json")
    wanted = {"init": str(folder / "config.json"), "samples_per_rank": 4, "schedule": "constant", "resume": "auto"}
    short = options(folder, Path("~/out"), **wanted | {"steps": 3})
    assert short.out == str(tmp_path / "out")
    longer = replace(short, steps=5, init=Path("~/moved/config.json"), lr_floor=0.2)
    branch = replace(longer, out="~/branch", resume="~/out/checkpoints/step-00000003")
    rows = {  # (options, whether files of ~/out change, how it ends, what is printed)
        "whole": (replace(longer, out="~/whole"), False, ENDED, "5 steps"),
        "short": (short, True, ENDED, "3 steps"),
        "again": (short, False, ENDED, "has ended after step 3: ~/out/model has its weights. Nothing was changed"),
        "never": (
            replace(short, resume="never"),
            False,
            "FileExistsError: ~/out holds a run that has ended after step 3: give",
            "",
        ),
        "no step for it": (
            replace(short, lr=0.1),
            False,
            ENDED,
            "no step is left for what was changed: --lr was 0.001 and is",
        ),
        "longer": (longer, True, ENDED, "--lr-floor was 0.1 and is 0.2; --steps was 3 and is 5"),
        "again, longer": (longer, False, ENDED, "has ended after step 5"),
        "shorter": (short, {"run.json", "run.yaml"}, ENDED, "all 3 steps are done already"),
        "branch": (branch, False, ENDED, "continuing after step 3 of 5"),
        "branch again": (replace(branch, steps=6), False, ENDED, "continuing after step 5 of 6, from ~/branch"),
        "a branch of no step": (replace(branch, out="~/none", steps=3), False, ENDED, "all 3 steps are done"),
        "none again": (replace(branch, out="~/none", steps=3, resume="auto"), False, ENDED, "has ended after step 0"),
        "not its own": (
            replace(branch, out="~/whole"),
            False,
            "FileExistsError: ~/whole holds a run that has ended after step 5",
            "",
        ),
        "going back": (
            replace(branch, out="~/branch", resume="~/branch/checkpoints/step-00000003"),
            False,
            "FileExistsError: --resume ~/branch/checkpoints/step-00000003 is not the newest checkpoint of the run in",
            "",
        ),
        "other files": (
            replace(longer, init=str(folder / "without-dropout.json")),
            False,
            "ValueError: the run in",
            "",
        ),
    }
    jobs_of = {name: wanted for name, (wanted, *_) in rows.items()}
    found = ranks.run(_in_turn, 1, jobs_of, tmp_path / "out")[0]
    for name, (_, changes, end, said) in rows.items():
        ended, changed, printed = found[name]
        assert ended.startswith(end.replace("~", str(tmp_path))), f"{name}: {ended}"
        assert said.replace("~", str(tmp_path)) in printed, f"{name}: {printed}"
        assert changed == changes if isinstance(changes, set) else bool(changed) == changes, f"{name}: {changed}"
    assert "5 steps over" in (tmp_path / "out" / "report.html").read_text(), "the report is of all steps"
    assert losses(tmp_path / "out") == losses(tmp_path / "whole")
    of_branch = [line["loss"] for line in read_metrics(tmp_path / "branch" / "metrics.jsonl")]
    assert of_branch[:2] == losses(tmp_path / "out")[3:]
    got, want = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("out", "whole"))
    assert all(torch.equal(value, want[name]) for name, value in got.items())


def test_a_last_checkpoint_that_fails_costs_no_model(folder: Path, tmp_path: Path) -> None:
    """Nor are damaged checkpoints a reason to start again."""
    (tmp_path / "checkpoints").mkdir()
    wanted = options(folder, tmp_path, steps=1, samples_per_rank=4, resume="auto")
    with mock.patch(
        "odc_triton.jobs.checkpoints.steps.write_checkpoint", side_effect=CheckpointFailed([0], "no space")
    ):
        assert jobs.train(0, 1, [wanted]) == ["CheckpointFailed: no space"]
    assert (tmp_path / "model" / "config.json").exists()
    assert json.loads((tmp_path / "run.json").read_text())["ended"] is None, "the same command tries again"
    assert jobs.train(0, 1, [wanted]) == [ENDED]
    (damaged,) = (tmp_path / "checkpoints").glob("step-*")
    (damaged / ".metadata").write_bytes(b"")
    with pytest.warns(UserWarning, match="skipped"):
        (said,) = jobs.train(0, 1, [replace(wanted, steps=2)])
    assert said.startswith("CheckpointCorrupt: no checkpoint in")


def test_ranks_wait_while_rank_0_works(folder: Path, tmp_path: Path) -> None:
    """It alone reads all of a checkpoint before a resume, and alone writes the model: that has no deadline."""
    works, seen = [], []

    @contextlib.contextmanager
    def working(_: Barrier) -> Iterator[None]:
        works.append(True)
        yield
        works.pop()

    def noted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given, **how: (seen.append((name, bool(works))), call(*given, **how))[1]

    with (
        mock.patch.object(Barrier, "working", working),
        mock.patch.object(Checkpoints, "newest", noted("read", Checkpoints.newest)),
        mock.patch.object(loop, "save_model", noted("write", loop.save_model)),
    ):
        wanted = options(folder, tmp_path, samples_per_rank=4, resume="auto")
        assert jobs.train(0, 1, [replace(wanted, steps=1), replace(wanted, steps=2)]) == [ENDED, ENDED]
    assert seen == [("write", True), ("read", True), ("write", True)]


def test_runs_that_have_ended(tmp_path: Path) -> None:
    """By their records; those of older versions wrote their model after the last step, and perhaps no checkpoint."""
    folder, identity = RunFolder(tmp_path / "out"), {"steps": 3, "seed": 0}
    metrics, config = tmp_path / "out" / "metrics.jsonl", tmp_path / "out" / "model" / "config.json"
    folder.lock(resume="never")
    config.parent.mkdir()
    config.touch()  # of a base model that the user put there
    folder.take(identity)
    metrics.write_text('{"step": 3}\n')
    assert not folder.has_ended(identity), "it was killed: it starts again"
    (tmp_path / "out" / "run.json").write_text(json.dumps({"identity": identity}))  # as an older version wrote it
    assert not folder.has_ended(identity)
    os.utime(config, ns=(later := metrics.stat().st_mtime_ns + 1, later))
    assert folder.has_ended(identity)
    with pytest.raises(ValueError, match=r"has no checkpoint to go on from: .* --model .*out/model, in another --out"):
        folder.has_ended(identity | {"steps": 5})
    (tmp_path / "out" / "checkpoints" / "step-00000003").mkdir(parents=True)
    assert not folder.has_ended(identity | {"steps": 5}), "it can go on"
    folder.take(identity)
    folder.end(3)
    assert (folder.ended_step, folder.has_ended(identity)) == (3, True)
    folder.take(identity | {"steps": 5})
    assert not folder.has_ended(identity | {"steps": 5}), "it was killed before it was longer"
    config.unlink()
    assert folder.ended_step == 0, "its model is gone: it is written again"
    folder.release()


def test_other_options_are_named(folder: Path, tmp_path: Path) -> None:
    wanted = options(folder, tmp_path / "out", steps=2)
    other = replace(wanted, resume="auto", lr=2e-3, balance="local", samples_per_rank=4)
    three = replace(wanted, out=str(tmp_path / "three"), replicas=3)
    ended, started_anew, differs, not_split = jobs.run(2, wanted, wanted, other, three)
    assert ended == ENDED
    assert started_anew.startswith("FileExistsError")
    assert "--resume auto" in started_anew
    assert "--balance was 'mini' and is 'local'" in differs
    assert "--lr" not in differs, "it may be changed"
    assert "samples per step was 4 and is 8" in differs
    assert "steps" not in differs.replace("samples_per_step", "")
    assert "2 ranks can't be split into 3 equal replicas: give a divisor of 2" in not_split


def test_a_checkpoint_is_due_before_a_kill_would_lose_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 70 s, and 12 s to save: what is lost at the worst is what came since the last whole checkpoint."""
    now_s = 0.0
    monkeypatch.setattr("odc_triton.jobs.train.save_clock.time.monotonic", lambda: now_s)
    clock, saved_s, lost_s, saves = SaveClock(600.0), 0.0, [], 0
    for step in range(60):
        evaluation_s = 90.0 * (step % 4 == 3)
        clock.ahead_s = evaluation_s + 90.0 * (step % 4 == 2)
        now_s += 70
        clock.settle([clock.report(), True])
        assert clock.is_due == clock.report(), "rank 0 decides"
        now_s += evaluation_s
        if clock.is_due:
            begun_s = now_s
            clock.begin()
            now_s += 12
            lost_s.append(now_s - saved_s)  # by a kill at the end of saving
            clock.end()
            saved_s, saves = begun_s, saves + 1
        clock.end()  # as with checkpoints in the background: it still is
        clock.restart()
    assert max(lost_s) <= 600
    assert now_s / saves > 420, "and hardly more often"
    off = SaveClock(0.0)
    now_s += 10_000
    assert not off.report()


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
