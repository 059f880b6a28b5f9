"""The GPU suite on a machine without a GPU: what it keeps whatever ends a run."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import bench.suites.gpu as suite
from bench.device import Rehearsal
from bench.provenance import ROOT, WARNING
from bench.suites.gpu.__main__ import lacks, main
from bench.suites.gpu.plan import FIRST, STAGES, Run
from tests.support.deadlines import LONG_S

SUITE_S = 200  # of all runs of a test here, most of which end in a second


@pytest.fixture(autouse=True)
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `run_of` writes is found by `python -m`, and no pytest that the suite starts takes itself for a worker."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the suite prepends to both


SAYS = """import json, os, sys, time
file = sys.argv[1]
def say(x):
    open(file + '.new', 'w').write(json.dumps(x))
    os.replace(file + '.new', file)
"""


def run_of(folder: Path, program: str, **how: Any) -> Run:
    """A run of `program`, in which `say(x)` is what it has found so far."""
    name = f"given_{abs(hash(program))}"
    (folder / f"{name}.py").write_text(f"{SAYS}{program}\n")
    words = (name, "{out}/found.json")
    return Run(words=words, rehearsal=words, **{"seconds": SUITE_S, "found": "found.json"} | how)


def ran(folder: Path, *names: str, stages: dict[str, dict[str, Run]], seconds: int = SUITE_S) -> tuple[int, dict]:
    """The exit code, and gpu_suite.json's runs."""
    code = main(["--rehearse", "--out", str(folder / "out"), "--seconds", str(seconds), *names], stages)
    return code, json.loads((folder / "out" / "gpu_suite.json").read_text())["runs"]


# By name of a run: its program, other options than the usual, its verdict and what it found.
RUNS = {
    "passes": ("say(1)", {}, "passed", 1),
    "finds what is wrong": ("say(0)", {}, "FAILED", 0),
    "fails": ("say(1); sys.exit(3)", {}, "FAILED", 1),
    "finds nothing": ("pass", {}, "FAILED", None),
    "need find nothing": ("pass", {"found": ""}, "passed", None),
    "is cut short": ("say(1); time.sleep(600)", {"seconds": 6}, "cut short", 1),
    # A fault ends it; it is started again and keeps what it has.
    "is started again": (
        "seen = json.load(open(file)) + 1 if os.path.exists(file) else 1\nsay(seen)\nsys.exit(seen < 3)",
        {"tries": 4},
        "passed",
        3,
    ),
}


@pytest.mark.slow
def test_verdicts_and_that_what_passed_is_kept_and_what_failed_is_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    stages = {"s": {name: run_of(tmp_path, program, **how) for name, (program, how, *_) in RUNS.items()}}
    code, runs = ran(tmp_path, "s", stages=stages)
    assert code == 1
    assert {name: (run["verdict"], run["found"]) for name, run in runs.items()} == {
        f"s/{name}": tuple(wanted) for name, (_, _, *wanted) in RUNS.items()
    }
    capsys.readouterr()
    code, runs = ran(tmp_path, "s/passes", "s/fails", stages={"s": stages["s"] | {"fails": run_of(tmp_path, "say(1)")}})
    assert code == 0
    assert runs["s/fails"]["verdict"] == "passed"
    assert "s/passes: passed before" in capsys.readouterr().out
    assert len(runs) == len(RUNS)


@pytest.mark.slow
def test_killed_at_any_moment_it_leaves_what_had_ended(tmp_path: Path) -> None:
    """SIGKILL while the second run has found something and goes on; what it had started dies with it."""
    program = f"say(1); open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    runs = f"{{'s': {{'a': {run_of(tmp_path, 'say(1)')!r}, 'b': {run_of(tmp_path, program)!r}}}}}"
    code = f"from bench.suites.gpu.__main__ import main\nfrom bench.suites.gpu.plan import Run\nmain(WORDS, {runs})"
    words = ["--rehearse", "--out", str(tmp_path / "out"), "s"]
    code = code.replace("WORDS", repr(words)).replace(f"passes={bool!r}", "passes=bool")
    report, deadline_s = tmp_path / "out" / "gpu_suite.json", time.monotonic() + LONG_S
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=Rehearsal().environment()) as process:
        while not (report.exists() and json.loads(report.read_text())["runs"].get("s/b", {}).get("found")):
            assert process.poll() is None
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    data = json.loads(report.read_text())
    assert {name: (run["verdict"], run["found"]) for name, run in data["runs"].items()} == {
        "s/a": ("passed", 1),
        "s/b": ("killed", 1),
    }
    (about,) = data["about"].values()
    assert {"gpu", "versions", "commit", "hardware", "source", "rehearsal"} <= about.keys()
    while (Path("/proc") / (tmp_path / "pid").read_text()).exists():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    done = subprocess.run(
        [sys.executable, "-m", "bench.suites.gpu", "report", "--out", str(tmp_path / "out")],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(WARNING)
    assert re.search(r"s/b +\| killed", done.stdout)


def test_what_is_not_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    words, device = ("suite",), Rehearsal()
    assert lacks(Run(words=words, seconds=1), (), device) == "there is nothing of it to rehearse"
    assert lacks(Run(words=words, seconds=1, gpus=3), words, device) == "it needs 3 GPUs; here: 2"
    monkeypatch.setenv("PATH", "")
    assert lacks(Run(words=words, seconds=1, under=("tool",)), words, device) == "compute-sanitizer is not installed"
    assert lacks(Run(words=words, seconds=1, gpus=2), words, device) == ""


def in_a_plain_checkout(*words: str) -> str:
    """What `python -m WORDS` prints where this checkout is not installed: -S leaves out what finds it."""
    env = Rehearsal().environment() | {"PYTHONPATH": str(Path(pytest.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-S", "-m", *words], cwd=ROOT, env=env, capture_output=True, text=True)
    assert "Error" not in done.stderr, done.stderr
    return done.stdout


@pytest.mark.slow
def test_in_a_plain_checkout(tmp_path: Path) -> None:
    """Its own process needs the kernels, and so does the first run that it starts."""
    words = ("bench.suites.gpu", "--rehearse", "--out", str(tmp_path), "--seconds", str(SUITE_S), "premises/machine")
    assert "premises/machine: passed" in in_a_plain_checkout(*words)


def test_the_plan() -> None:
    named = {word for runs in STAGES.values() for run in runs.values() for word in (*run.words, *run.rehearsal)}
    files = {word for word in named if word.startswith("tests/")}
    assert [name for name in files if not (ROOT / name).exists()] == []
    found = (path for folder in ("gpu", "kernels") for path in (ROOT / "tests" / folder).glob("test_*.py"))
    there = {str(path.relative_to(ROOT)) for path in found}
    # They learn nothing on a GPU.
    needless = "machine_code", "contention", "descriptors", "near_and_far", "refusals", "tiles"
    assert there - files == {f"tests/kernels/test_{name}.py" for name in needless}
    for line in re.findall(r"-m bench\.suites\.gpu ([a-z -]+?)(?:   |\n)", suite.__doc__):
        assert sum(run.seconds for stage in line.split() for run in STAGES[stage].values()) <= 600, line
    assert all(run.seconds <= 600 for runs in STAGES.values() for run in runs.values())
    assert set(FIRST) <= set(STAGES)
