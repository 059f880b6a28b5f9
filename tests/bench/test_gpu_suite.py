"""The GPU suite on a machine without a GPU: its clock, its files, its verdicts, what it says.

By real pytest and small commands; test_gpu_suite_command.py has the command, and a rehearsal of all stages.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import bench.suites.gpu as suite
from bench.device import Rehearsal
from bench.provenance import WARNING, append_line, read_lines
from bench.suites.gpu import measured
from bench.suites.gpu.__main__ import NAMES
from bench.suites.gpu.measured import Runs, ending, learned, long_lengths, run_kernels, run_memcheck
from bench.suites.gpu.outcomes import LINES, ONE_GPU, Found, Ledger, found_of, key_of, write_report
from bench.suites.gpu.plan import ON_A_GPU, REHEARSAL, STAGES, chosen, seconds_for
from bench.suites.gpu.process import ROOT, install
from bench.suites.gpu.tests import TEST_S, run_tests
from tests.support import ranks

ENVIRONMENT = Rehearsal().environment()


def ledger_in(folder: Path, key: str = "here") -> Ledger:
    return Ledger(folder=folder, key=key)


def running(*words: str) -> Iterator[str]:
    """Command lines of processes, that have all these words."""
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = entry.read_text().replace("\0", " ")
            if all(word in line for word in words):
                yield line


# The tests that the suite's pytest is given: what each does, and what must be known of it although it ran beside tests
# that hang, die and break what they share a process with.
GIVEN = {
    "test_good": ("pass", "passed"),
    "test_bad": ("assert 1 == 2, 'no luck'", "failed"),
    "test_skipped": ("pytest.skip('not here')", "skipped"),
    # A wrong address on a GPU: every later call in this process fails, so the next test must have another process.
    "test_breaks_its_context": ("sys.modules['torch'] = LOST; LOST.cuda.synchronize()", "failed"),
    "test_after_it": ("assert sys.modules.get('torch') is not LOST", "passed"),
    "test_dies": ("os._exit(3)", "failed"),
    "test_hangs": ("time.sleep(300)", "failed"),
}
HEAD = """import os, sys, time, types, pytest

def lost():
    raise RuntimeError("an illegal memory access")

LOST = types.SimpleNamespace(cuda=types.SimpleNamespace(is_initialized=lambda: True, synchronize=lost))
"""


def write_tests(folder: Path, *, names: list[str]) -> str:
    counted = f"open({str(folder / 'ran')!r}, 'a').write"
    bodies = [f"def {name}():\n    {counted}('{name}\\n')\n    {GIVEN[name][0]}\n" for name in names]
    (folder / "test_given.py").write_text("\n\n".join([HEAD, *bodies]))
    return str(folder / "test_given.py")


def ran(folder: Path) -> list[str]:
    return (folder / "ran").read_text().split()


def by_name(found: Found) -> dict[str, str]:
    return {test.rpartition("::")[2]: record["outcome"] for test, record in found.tests.items()}


def test_every_outcome_is_kept_whatever_ends_the_run(tmp_path: Path) -> None:
    """One worker runs all, so each test begins in the process that the one before it left, or in a new one."""
    path, ledger = write_tests(tmp_path, names=list(GIVEN)), ledger_in(tmp_path)
    (tmp_path / "test_broken.py").write_text("import no_such_module\n")
    paths = [str(tmp_path / "test_broken.py"), path]
    how = {"marker": "not gpu", "words": ["--timeout", "5"]}
    assert run_tests(ledger, "engine", paths, ENVIRONMENT, 200, **how) == {"passed": False, "cut": False}
    found = ledger.stage("engine")
    outcomes = by_name(found)
    assert "no_such_module" in next(record["text"] for record in found.tests.values() if "broken" in record["test"])
    assert {name: outcomes.get(name) for name in GIVEN} == {name: outcome for name, (_, outcome) in GIVEN.items()}
    texts = {test["test"].rpartition("::")[2]: test["text"] for test in found.failures}
    assert "no luck" in texts["test_bad"]
    assert "crashed" in texts["test_dies"]
    assert "illegal memory access" in texts["test_breaks_its_context"]
    assert "crashed" in texts["test_hangs"]
    assert found.running == []


def test_the_clock_ends_what_it_cuts_short(tmp_path: Path) -> None:
    path = write_tests(tmp_path, names=["test_hangs"])
    assert run_tests(ledger_in(tmp_path), "four", [path], ENVIRONMENT, 4, marker="not gpu") == {
        "passed": False,
        "cut": True,
    }
    assert list(running(path)) == []


def test_what_passed_is_not_run_again(tmp_path: Path) -> None:
    path, ledger = write_tests(tmp_path, names=["test_bad", "test_good", "test_skipped"]), ledger_in(tmp_path)
    given = {"environment": ENVIRONMENT, "seconds": 60, "marker": "not gpu", "workers": 0}
    assert not run_tests(ledger, "engine", [path], words=["-k", "bad or skipped"], **given)["passed"]
    (tmp_path / "test_given.py").write_text((tmp_path / "test_given.py").read_text().replace("1 == 2", "1 == 1"))
    assert run_tests(ledger, "engine", [path], **given) == {"passed": True, "cut": False}
    assert ran(tmp_path) == ["test_bad", "test_skipped", "test_good", "test_bad"], "what failed comes last"
    assert run_tests(ledger, "engine", [path], **given)["passed"], "nothing is left to run"
    assert len(ran(tmp_path)) == 4
    assert run_tests(ledger, "engine", [path], again=True, **given)["passed"]
    assert len(ran(tmp_path)) == 7


def test_nothing_collected_is_no_success(tmp_path: Path) -> None:
    path = write_tests(tmp_path, names=["test_good"])
    assert not run_tests(ledger_in(tmp_path), "engine", [path], ENVIRONMENT, 60, workers=0)["passed"]


WRITES = "import json, os, sys, time\ndef say(x):\n    open('{path}.new', 'w').write(json.dumps(x))\n"
WRITES += "    os.replace('{path}.new', '{path}')\n"


@pytest.mark.parametrize(
    ("program", "seconds", "result", "data"),
    [
        ("say(1)", 20, True, 1),
        ("say(1); say(2); sys.exit(3)", 20, False, 2),
        ("pass", 20, False, None),
        ("say(1); time.sleep(1); say(2); time.sleep(60)", 3, None, 2),
    ],
    ids=["ends well", "fails", "finds nothing", "is cut short"],
)
def test_runs_keep_what_they_have(
    tmp_path: Path, program: str, seconds: float, result: bool | None, data: int | None
) -> None:
    path = tmp_path / "found.json"
    command = [sys.executable, "-S", "-c", WRITES.format(path=path) + program]

    def once() -> bool | None:
        runs = Runs(ledger=ledger_in(tmp_path), stage="step", environment={}, deadline_s=time.monotonic() + seconds)
        return runs.run("one", command, measured._json(path), measured._found)

    assert once() is result
    record = ledger_in(tmp_path).stage("step").runs["one"]
    assert (record["passed"], record["data"], record["cut"]) == (bool(result), data, result is None)
    if result is None:
        found = [line["data"] for line in read_lines(tmp_path / LINES) if line["passed"] is None]
        assert found == [1, 2], "written down while it went on"
        return
    path.unlink(missing_ok=True)
    lines = len(read_lines(tmp_path / LINES))
    assert once() is result
    assert (len(read_lines(tmp_path / LINES)) == lines) == result, "what passed is kept, what failed is tried again"


@pytest.mark.parametrize(
    ("results", "said"),
    [([True, True], (True, False)), ([True, None], (False, True)), ([False, None], (False, False))],
)
def test_how_runs_end_a_stage(results: list[bool | None], said: tuple[bool, bool]) -> None:
    assert tuple(ending(results).values()) == said


@pytest.mark.parametrize(
    ("losses", "code", "passes"),
    [
        ([6.0] * 10 + [3.0] * 90, 0, True),
        ([6.0] * 10 + [5.5] * 90, 0, False),
        ([6.0] * 99 + [0.1], 0, False),
        ([6.0] * 10 + [3.0] * 90, 1, False),
        ([6.0] * 10 + [3.0] * 40, None, False),
        ([], 0, False),
    ],
    ids=["falls", "falls too little", "falls at the end only", "fails", "is cut short", "has no loss"],
)
def test_training_passes_by_its_loss(tmp_path: Path, losses: list[float], code: int | None, passes: bool) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {i}, "loss": {x}}}\n' for i, x in enumerate(losses)))
    data = measured._curve(tmp_path)()
    assert learned(data, code) is passes
    assert (data or {"losses": []})["losses"] == losses


def test_kernels_go_on_after_what_ends_their_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """bench.kernels.run's process, which ends without a word after its first cell and in order after its second."""
    calls: list[list[str]] = []

    def process(command: list[str], environment: dict[str, str], seconds: float) -> tuple[int, str]:
        calls.append(command)
        append_line(tmp_path / "kernels.jsonl", {"cell": {"passed": True}})
        if len(calls) == 2:
            append_line(tmp_path / "kernels.jsonl", {"end": True})
        return (0, "") if len(calls) == 2 else (1, "Fatal Python error: Aborted")

    monkeypatch.setattr(measured, "run", process)
    runs = Runs(ledger=ledger_in(tmp_path), stage="kernels-timed", environment={}, deadline_s=time.monotonic() + 100)
    assert run_kernels(runs, tmp_path, ["--world", "8"]) == {"passed": True, "cut": False, "cells": 2}
    assert len(calls) == 2
    assert all("--resume" in call and call[-2:] == ["--world", "8"] for call in calls)
    assert "Fatal Python error" in ledger_in(tmp_path).stage("kernels-timed").said[0]


@pytest.mark.parametrize(
    ("kinds", "verdict"),
    [
        ([], "not run"),
        (["begin", "test"], "killed before its end"),
        (["begin", ("end", True, False)], "passed"),
        (["begin", ("end", False, False)], "FAILED"),
        (["begin", ("end", False, True)], "cut short, nothing failed"),
        (["begin", ("end", True, False), "begin"], "killed before its end"),
    ],
)
def test_verdicts(kinds: list[Any], verdict: str) -> None:
    lines: list[dict[str, Any]] = []
    for kind in kinds:
        kind, passed, cut = kind if isinstance(kind, tuple) else (kind, None, None)
        lines.append({"stage": "four", "kind": kind, "passed": passed, "cut": cut, "test": "t", "outcome": "passed"})
    assert found_of("four", lines).verdict == verdict
    assert found_of("step", lines).verdict == "not run"


def test_a_torn_line_costs_itself_only(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    append_line(path, {"a": 1})
    with path.open("ab") as file:
        file.write(b'{"b": ')  # where a kill came
    assert read_lines(path) == [{"a": 1}]
    append_line(path, {"c": 3})
    assert read_lines(path) == [{"a": 1}, {"c": 3}]


def test_what_a_result_depends_on() -> None:
    about = {"source": "1", "versions": {"torch": "2"}, "gpus": 1, "rehearsal": False, "gpu": {"name": "H", "t": "30"}}
    same = [{"when": "now"}, {"commit": "other"}, {"gpu": {"name": "H", "t": "31"}}]
    others = [{"source": "2"}, {"versions": {"torch": "3"}}, {"gpus": 2}, {"rehearsal": True}, {"gpu": {"name": "A"}}]
    assert {key_of(about | change) for change in same} == {key_of(about)}
    assert len({key_of(about | change) for change in [{}, *others]}) == len(others) + 1


def test_after_a_fix_what_passed_may_be_kept(tmp_path: Path) -> None:
    Ledger(folder=tmp_path, key="place-1").add("test", stage="four", test="t", outcome="passed")
    Ledger(folder=tmp_path, key="elsewhere-2").add("test", stage="four", test="u", outcome="passed")
    assert Ledger(folder=tmp_path, key="place-2").stage("four").tests == {}
    assert list(Ledger(folder=tmp_path, key="place-2", any_code=True).stage("four").tests) == ["t"]


def test_stages_share_the_time() -> None:
    first, left_out = chosen([], gpus=1)
    assert [stage.name for stage in first] == ["checks", "kernels-right", "engine", "train", "kernels-timed"]
    assert left_out == []
    assert sum(stage.seconds for stage in first) <= 26 * 60
    assert all(stage.seconds <= 8 * 60 for stage in STAGES), "a command takes ten minutes at most"
    told = dict(re.findall(r"^    ([a-z-]+) +(\d+)  ", suite.__doc__, re.MULTILINE))
    assert told == {stage.name: str(stage.seconds) for stage in STAGES}
    assert chosen(["lengths", "four", "links"], gpus=1)[1] == ["links", "lengths"]
    assert [stage.name for stage in chosen(["killed", "checks"], gpus=2)[0]] == ["checks", "killed"]
    assert seconds_for(first[-1:], 77.0) == 77.0
    assert seconds_for(first[-2:], 60.0) == 60.0 * 180 / 600


def test_both_plans_name_files_that_are_there() -> None:
    for given in (ON_A_GPU, REHEARSAL):
        assert set(given.tests) == set(ON_A_GPU.tests)
        for tests in given.tests.values():
            assert [name for name in tests.files if not (ROOT / name).exists()] == []
    named = {name for tests in ON_A_GPU.tests.values() for name in tests.files}
    there = [path for folder in ("gpu", "kernels") for path in (ROOT / "tests" / folder).glob("test_*.py")]
    without_a_gpu = {
        f"tests/kernels/test_{name}.py" for name in ("machine_code", "contention", "near_and_far", "tiles")
    }
    assert {str(path.relative_to(ROOT)) for path in there} - named == without_a_gpu


def test_tests_end_their_ranks_before_the_suite_ends_them() -> None:
    """So the report names the ranks that did not come, not only the test."""
    assert inspect.signature(ranks.run).parameters["timeout_s"].default < TEST_S
    for path in (ROOT / "tests" / "gpu").glob("*.py"):
        assert all(int(seconds) < TEST_S for seconds in re.findall(r"timeout_s=(\d+)", path.read_text())), path


def _environment_of(rank: int, world: int) -> str | None:
    return os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK")


def test_ranks_are_forked_from_a_process_that_does_not_initialise_cuda() -> None:
    assert ranks.run(_environment_of, 1) == ["1"]


def test_what_a_launched_rank_imports_asks_nothing_of_cuda() -> None:
    """It sets CUDA_VISIBLE_DEVICES first."""
    code = "import torch\n\ndef asked(*_):\n    raise SystemExit('CUDA was asked')\n\n"
    code += "torch.cuda.is_available = torch.cuda.device_count = torch.cuda.init = asked\n"
    for module, status in (("tests.gpu.launched", 0), ("tests.gpu.marks", 1)):
        done = subprocess.run([sys.executable, "-c", f"{code}import {module}"], cwd=ROOT, capture_output=True)
        assert done.returncode == status, module


def test_the_report_needs_only_the_lines(tmp_path: Path) -> None:
    about = {"rehearsal": False, "gpu": {"name": "H200"}, "gpus": 1, "commit": "abc", "kernel": "6.1"}
    old, new = ledger_in(tmp_path, "old"), ledger_in(tmp_path, "new")
    for ledger, commit in ((old, "before"), (new, "abc")):
        ledger.add("about", about=about | {"commit": commit})
        ledger.add("begin", stage="engine", seconds=5)
    new.add("test", stage="engine", test="t::a", outcome="passed", seconds=2.0, text="")
    new.add("test", stage="engine", test="t::b", outcome="failed", seconds=1.0, text="E   no luck")
    new.add("test begins", stage="engine", test="t::c")
    new.add("begin", stage="train", seconds=5)
    new.add("run", stage="train", name="one", passed=False, cut=True, data={"first": 2.0, "last": 1.0, "losses": [2.0]})
    new.add("run", stage="train", name="two", passed=False, cut=False, data=None, text="Traceback")
    new.add("run", stage="train", name="three", passed=None, data=None)
    write_report(tmp_path, NAMES)
    data = json.loads((tmp_path / "gpu_suite.json").read_text())
    assert data["rehearsal"] is False
    assert [machine["about"]["commit"] for machine in data["machines"]] == ["abc", "before"]
    engine = data["machines"][0]["stages"]["engine"]
    assert engine["verdict"] == "killed before its end"
    assert engine["counts"] == {"passed": 1, "failed": 1}
    assert engine["failures"] == [{"test": "t::b", "seconds": 1.0, "text": "E   no luck"}]
    assert engine["running_at_the_end"] == ["t::c"]
    text = (tmp_path / "gpu_suite.md").read_text()
    for words in ("- one: cut short, loss 2.0", "- two: FAILED", "Traceback", "- three: killed before its end"):
        assert words in text
    for words in ("# H200, commit abc", "kernel: 6.1", ONE_GPU, "1 passed, 1 failed, 0 skipped", "t::b", "no luck"):
        assert words in text
    assert WARNING not in text


def test_long_lengths() -> None:
    lengths = long_lengths(5000, 8192)
    assert max(lengths) == 8192
    assert min(lengths) >= 16
    # LongAlign: 16.5 K tokens on average, at most 64 K.
    assert sum(lengths) / len(lengths) / 8192 == pytest.approx(16.5 / 64, rel=0.1)
    assert long_lengths(10, 64) == long_lengths(10, 64)


def memcheck_in(folder: Path, environment: dict[str, str], seconds: float) -> tuple[dict[str, Any], Found]:
    runs = Runs(
        ledger=ledger_in(folder), stage="memcheck", environment=environment, deadline_s=time.monotonic() + seconds
    )
    record = run_memcheck(runs)
    return record, runs.ledger.stage("memcheck")


def stand_in(folder: Path, errors: int) -> dict[str, str]:
    """An environment whose compute-sanitizer runs the command that it is given, as the real one does, and says so."""
    tool = folder / "compute-sanitizer"
    tool.write_text(
        f'#!/bin/sh\ntest "$PYTORCH_NO_CUDA_MEMORY_CACHING" = 1 || exit 3\nshift 4\n"$@"\ncode=$?\n'
        f'echo "========= ERROR SUMMARY: {errors} errors"\n[ {errors} = 0 ] || exit 99\nexit $code\n'
    )
    tool.chmod(0o755)
    return ENVIRONMENT | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def test_memcheck_without_the_tool(tmp_path: Path) -> None:
    homes = {"PATH": str(tmp_path), "CUDA_HOME": "", "CUDA_PATH": ""}
    record, found = memcheck_in(tmp_path, ENVIRONMENT | homes, 60)
    assert record == {"passed": True, "cut": False, "note": "not run: compute-sanitizer is not present"}
    assert found.runs == {}


@pytest.mark.slow
@pytest.mark.parametrize("errors", [0, 2])
def test_memcheck(tmp_path: Path, errors: int) -> None:
    """With a stand-in for the tool and Triton's interpreter for the GPU: the command that it is given does run."""
    record, found = memcheck_in(tmp_path, stand_in(tmp_path, errors), 100)
    data = found.runs["memcheck"]["data"]
    assert data["errors"] == errors
    assert record["passed"] == (errors == 0), data
    assert "cells passed their check" in data["text"]


def test_memcheck_cut_short(tmp_path: Path) -> None:
    record, found = memcheck_in(tmp_path, stand_in(tmp_path, 0), 2)
    assert record == {"passed": False, "cut": True}
    assert found.runs["memcheck"]["data"]["errors"] is None


@pytest.mark.slow
def test_installed_without_network(tmp_path: Path) -> None:
    installed = install(tmp_path)
    code = "import odc_kernels.peers, odc_triton.comm.layout; print(odc_kernels.__path__[0])"
    environment = {"PYTHONPATH": installed["path"], "PATH": os.environ["PATH"]}
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path += {sys.path!r}; {code}"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().startswith(installed["path"]), installed
