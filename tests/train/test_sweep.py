"""Sweeps: each run has the bits of the same run alone, whatever becomes of the others; files that are refused."""

from __future__ import annotations

import json
import os
import re
import signal
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from odc_triton.jobs.options.config_file import write_config
from odc_triton.jobs.train.sft_options import SftOptions
from odc_triton.jobs.train.sweep_options import Sweep, SweepOptions, read_sweep
from odc_triton.jobs.train.sweep_report import RunEnd, write_summary
from tests.support import jobs, ranks, slow
from tests.support.sft_case import case, write_case


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_case(tmp_path_factory.mktemp("sweep"))
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder / "config.json")
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder / "base")
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "teacher")
    return folder


def sweep(folder: Path, out: Path, runs: dict[str, dict[str, Any]], *, each: int = 1, **common: Any) -> Sweep:
    """As `read_sweep` makes it. `each`: ranks of a run."""
    same = {"init": None, "model": str(folder / "base"), "lora_rank": 4, "steps": 4, "lr": 1e-2, "warmup_steps": 0}
    made = {
        name: case(folder, out=str(out / name), **(same | {"samples_per_rank": 2} | common | own))
        for name, own in runs.items()
    }
    return Sweep(out=str(out), ranks_per_run=each, runs=made, varied=("lr",))


def _train(rank: int, world: int, wanted: Sweep, stop_after: int | None = None) -> str:
    """How the sweep ended on this rank, which may be told to stop in its first run's step `stop_after`."""
    from odc_triton.jobs.launcher.launch import Interrupted
    from odc_triton.jobs.train import sft, sweep

    def stopping(*given: Any, **how: Any) -> Any:
        def on_metrics(metrics: dict[str, Any]) -> None:
            if metrics["step"] == stop_after:
                os.kill(os.getpid(), signal.SIGTERM)

        return train_sft_among(*given, **how | {"on_metrics": on_metrics})

    train_sft_among = sft.train_sft_among
    no_images = mock.patch("odc_triton.jobs.train.outcome.can_draw", return_value=False)
    with no_images, mock.patch.object(sft, "train_sft_among", stopping if stop_after else train_sft_among):
        try:
            sweep.train_all(wanted)
        except (RuntimeError, Interrupted) as error:
            return f"{type(error).__name__}: {error}"
    return jobs.ENDED


def _summary(wanted: Sweep) -> dict[str, str]:
    found = json.loads((Path(wanted.out) / "sweep.json").read_text())
    return {row["run"]: row["status"] for row in found["runs"]}


def _written(options: SftOptions) -> tuple[bytes, ...]:
    """The adapter, the base's digest in the last checkpoint, and the losses."""
    out = Path(options.out)
    (*_, last) = sorted((out / "checkpoints").glob("step-*"))
    files = out / "adapter" / "adapter_model.safetensors", last / "base.json"
    return *(each.read_bytes() for each in files), repr(jobs.losses(out)).encode()


def _alone(wanted: Sweep, name: str, out: Path) -> SftOptions:
    """The same run alone, on the same number of ranks."""
    options = replace(wanted.runs[name], out=str(out / name))
    assert jobs.run(wanted.ranks_per_run, options) == [jobs.ENDED]
    return options


def test_each_run_is_that_run_alone(folder: Path, tmp_path: Path) -> None:
    runs = {"long": {"steps": 6}, "fails": {"lr": 1e30, "max_skipped": 0}, "short": {"seed": 3, "lora_rank": 2}}
    wanted = sweep(folder, tmp_path / "sweep", runs)
    found = ranks.run(_train, 2, wanted)
    assert all(
        each.startswith("RuntimeError: 1 of 3 runs failed (fails). fails: step 2: the loss is") for each in found
    )
    assert _summary(wanted) == {"long": "ended", "short": "ended", "fails": "failed"}
    for name in ("long", "short"):
        assert _written(wanted.runs[name]) == _written(_alone(wanted, name, tmp_path)), name
    assert "6 steps over" in (tmp_path / "sweep" / "long" / "log.txt").read_text()
    # A run goes on alone, by the command for one.
    assert jobs.run(1, replace(wanted.runs["short"], resume="auto", steps=5)) == [jobs.ENDED]
    assert [line["step"] for line in jobs.lines(wanted.runs["short"].out)] == [1, 2, 3, 4, 5]


EXACT = {"exact": True}
FEATURES: dict[str, dict[str, Any]] = {
    "bf16": {"dtype": "bf16"},
    "nf4": {"dtype": "bf16", "quantize": "nf4", "gradient_checkpointing": True},
    "a teacher": {"teacher": "teacher", "samples_per_rank": 4},
    "itself as teacher": {"teacher": "base", "replace_layers": True, "eval_fraction": 0.2},
    "two ranks a run": {"each": 2, "share_prefixes": True},
    "two ranks a run, split": {"each": 2, "split_sequences": True, "token_cap": 64, "samples_per_rank": 1} | EXACT,
    "two ranks a run, a queue": {"each": 2, "balance": "queue", "dtype": "bf16"} | EXACT,
}


@pytest.mark.parametrize("how", [slow(each) for each in FEATURES])
def test_with(how: str, folder: Path, tmp_path: Path) -> None:
    """Runs of one rank on two ranks, runs of two on four."""
    common = FEATURES[how].copy()
    if (teacher := common.get("teacher")) is not None:
        common["teacher"] = str(folder / teacher)
    wanted = sweep(folder, tmp_path / "sweep", {"a": {}, "b": {"lr": 3e-3, "steps": 5}, "c": {"seed": 1}}, **common)
    assert ranks.run(_train, 2 * wanted.ranks_per_run, wanted) == [jobs.ENDED] * 2 * wanted.ranks_per_run
    for name in "abc":
        found, alone = _written(wanted.runs[name]), _written(_alone(wanted, name, tmp_path))
        assert found[1] == alone[1]
        assert (found == alone) or how == "two ranks a run, a queue", name


@pytest.mark.slow
@pytest.mark.parametrize("each", [1, 2])
def test_a_stop_and_a_resumed_sweep(each: int, folder: Path, tmp_path: Path) -> None:
    runs = {"a": {"steps": 8}, "b": {"steps": 7, "lr": 3e-3}, "c": {"seed": 1}}
    wanted = sweep(folder, tmp_path / "sweep", runs, each=each)
    assert ranks.run(_train, 2, wanted, 2) == ["Interrupted: stopped by SIGTERM"] * 2
    assert "waiting" in _summary(wanted).values()
    assert "stopped" in _summary(wanted).values()
    again = replace(wanted, runs={name: replace(run, resume="auto") for name, run in wanted.runs.items()})
    assert ranks.run(_train, 2, again) == [jobs.ENDED] * 2
    for name in runs:
        assert _written(wanted.runs[name]) == _written(_alone(wanted, name, tmp_path)), name


# Where rank 1 of a group fails: its log, the tokenizer, the data, sharding, the run, the report.
PLACES = ["sweep.open", "sft._readers", "sft.mix_of", "job.fully_shard", "sft.SftRun", "loop.gather_events"]


def _fail(rank: int, world: int, wanted: Sweep, place: str) -> str:
    module, name = f"odc_triton.jobs.train.{place}".rsplit(".", 1)
    real, failures = getattr(import_module(module), name, open), [OSError("no space")] * (rank == 1)

    def failing(*given: Any, **how: Any) -> Any:
        if failures:
            raise failures.pop()
        return real(*given, **how)

    with mock.patch(f"{module}.{name}", failing, create=True):
        return _train(rank, world, wanted)


@pytest.mark.parametrize("place", [slow(each) for each in PLACES])
def test_a_failure_on_one_rank_of_a_group(place: str, folder: Path, tmp_path: Path) -> None:
    """The sweep reports that rank's error. The next runs of the group, which share a queue, are right."""
    runs = {"first": {"steps": 6}, "second": {}, "third": {"seed": 1}}
    wanted = sweep(folder, tmp_path / "sweep", runs, each=2, balance="queue", timeout_minutes=0.3, **EXACT)
    found = ranks.run(_fail, 2, wanted, place)
    assert found == ["RuntimeError: 1 of 3 runs failed (first). first: rank 1: no space"] * 2
    assert _summary(wanted) == {"first": "failed", "second": "ended", "third": "ended"}
    assert "OSError: no space" in (tmp_path / "sweep" / "first" / "log.txt").read_text()
    each, alone = (jobs.lines(of.out) for of in (wanted.runs["second"], _alone(wanted, "second", tmp_path)))
    assert [(line["loss"], line["tokens"]) for line in each] == [(line["loss"], line["tokens"]) for line in alone]


GOOD = "model: base\ndata: d.parquet\nlora-rank: 4\n"
WRONG = [
    ("grid: {lr: [1e-3]}\nruns: [{lr: 1e-4}]", "row 1 of runs and grid both have lr"),
    ("grid: {lr: 1e-3}", "grid is {'lr': '1e-3'}: give options with lists of values"),
    ("runs: {lr: 1e-3}", "give a list of rows of options"),
    ("runs: []", "give a list of rows of options"),
    ("grid: {learning_rate: [1e-3]}", "there is no option learning_rate; learning_rate is lr here"),
    ("grid: {lr: [1e-3, fast]}", "grid: lr is 'fast'; give a number"),
    ("runs: [{lr: -1.0}]", "run lr=-1.0: --lr is -1.0; it must be positive and finite"),
    ("runs: [{name: a}, {name: a, lr: 1e-3}]", "two runs are called 'a'"),
    ("runs: [{name: a, lr: 1e-3}, {name: b, model: other}]", "run b has --model other and run a has base"),
    ("runs: [{dtype: bf16}, {lr: 1e-3}]", "runs of a sweep share one base"),
    ("runs: [{lora_rank: 0}]", "has no --lora-rank"),
    ("runs: [{out: here}]", "out can't be an option of a run in a sweep"),
    ("", "has one run: give a grid"),
    ("grid: {lr: [1e-3], lr: [1e-4]}", "lr appears twice"),
    ("runs: [{lr: 1e-4, eval-every: 1, eval_every: 2}]", "eval-every appears twice"),
    ("grid: {seed: [1, 1]}", "give each value once"),
    ("ranks-per-run: 2", "give --ranks-per-run on the command line"),
    ("run-name: a\ngrid: {seed: [1, 2]}", "run_name would be that of all runs"),
    ("runs: [{name: data, seed: 1}]", "no run's folder can be called data"),
    ("grid: {steps: [1]}\nruns: [{epochs: 2.0}]", "--epochs"),
]


@pytest.mark.parametrize(("text", "words"), WRONG)
def test_files_that_are_refused(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(GOOD + text)
    with pytest.raises(ValueError, match=re.escape(words)):
        read_sweep(tmp_path / "s.yaml", SweepOptions(out=str(tmp_path / "out")))


def test_a_file(tmp_path: Path) -> None:
    text = "grid: {lr: [1e-3, 2e-3], data: [a/x.parquet, [a/x.parquet, y.parquet]]}\n"
    text += "runs: [{}, {name: wide, lora_rank: 8}]"
    (tmp_path / "s.yaml").write_text(GOOD.replace("data: d.parquet\n", "") + text)
    found = read_sweep(tmp_path / "s.yaml", SweepOptions(out=str(tmp_path / "out"), resume="auto"))
    assert [*found.runs] == [
        f"{row}lr={lr},data={data}"
        for row in ("", "wide,")
        for lr in (0.001, 0.002)
        for data in ("a_x.parquet", "a_x.parquet+y.parquet")
    ]
    last = found.runs["wide,lr=0.002,data=a_x.parquet+y.parquet"]
    assert (last.lr, last.data, last.lora_rank, last.resume) == (2e-3, ("a/x.parquet", "y.parquet"), 8, "auto")
    assert Path(last.out) == tmp_path / "out" / "wide,lr=0.002,data=a_x.parquet+y.parquet"
    assert found.varied == ("data", "lr", "lora_rank")
    (tmp_path / "s.yaml").write_text(GOOD + "report-to: wandb\nruns: [{lr: 1e-3}]")
    (tracked,) = read_sweep(tmp_path / "s.yaml", SweepOptions(out=str(tmp_path / "many"))).runs.values()
    assert tracked.run_group == "many"


def test_rows_replace_common_options(tmp_path: Path) -> None:
    """Their alternatives too; null is the default."""
    text = "epochs: 2.0\nteacher: big\ngrid: {teacher: [other, null]}\nruns: [{steps: 5}]"
    (tmp_path / "s.yaml").write_text(GOOD + text)
    runs = read_sweep(tmp_path / "s.yaml", SweepOptions(out=str(tmp_path / "out"))).runs
    assert [*runs] == ["steps=5,teacher=other", "steps=5,teacher=none"]
    assert [(run.steps, run.epochs, run.teacher) for run in runs.values()] == [(5, None, "other"), (5, None, None)]


def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Best first, by the last line's losses; the options are those that a run has learned by."""
    ends = {"diverged": (1.0, None), "worse": (2.0, 0.9), "best": (1.0, 0.5), "equal": (0.5, 0.9)}
    runs = {name: SftOptions(data="d", model="m", out=str(tmp_path / name), lr=0.1) for name in (*ends, "waits")}
    for name, (loss, eval_loss) in ends.items():
        write_config(folder := tmp_path / name / "run.yaml", replace(runs[name], lr=0.25), comment="")
        lines = [
            {"step": 1, "loss": at, "eval_loss": each, "seconds": 1.0} for at, each in ((1, 0.1), (loss, eval_loss))
        ]
        (folder.parent / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    wanted = Sweep(out=str(tmp_path), ranks_per_run=1, runs=runs, varied=("lr",))
    with mock.patch("odc_triton.jobs.train.sweep_report.can_draw", return_value=False):
        write_summary(wanted, [RunEnd(name=name, where="rank 0") for name in ends])
    rows = json.loads((tmp_path / "sweep.json").read_text())["runs"]
    assert [row["run"] for row in rows] == ["best", "equal", "worse", "diverged", "waits"]
    assert [row["lr"] for row in rows] == [0.25] * 4 + [0.1]
    assert "in their folders. Continue with --resume auto." in capsys.readouterr().out
