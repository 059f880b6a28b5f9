"""The suite for GPUs, without one: what is written whatever ends a section, what passes, and that all of it runs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.device import Rehearsal
from bench.provenance import ROOT, read_lines
from bench.suites.gpu import __main__ as suite
from bench.suites.gpu.plan import ALL_TESTS, LINES, LISTS, LOG, LONGER, OPERATORS, QUARTER, TESTS, Section
from bench.suites.gpu.recurrent import FUNCTIONS
from tests.support import slow
from tests.support.deadlines import LONG_S
from tests.support.versions import RECURRENT


def says(gpu: Rehearsal, *, count: int = 1) -> Iterator[dict]:
    for number in range(count):
        yield {"what": "a number", "number": number}
        time.sleep(0.01 * (count > 1))


def passes(gpu: Rehearsal, *, count: int) -> Iterator[dict]:
    for _ in range(count):
        yield {"passed": True}
        time.sleep(0.01)


def raises(gpu: Rehearsal) -> Iterator[dict]:
    yield {"what": "a number"}
    raise ValueError("no such thing")


def faults(gpu: Rehearsal) -> Iterator[dict]:
    os.abort()


def hangs(gpu: Rehearsal) -> Iterator[dict]:
    yield {"what": "a number", "pid": os.getpid()}
    time.sleep(600)


class Here(Section):
    """A function of this file."""

    def lines(self, gpu: Any, folder: Path, left_s: float) -> Iterator[dict]:
        return globals()[self.run](gpu, **self.given)


class Lost(Rehearsal):
    def answers(self) -> bool:
        return False


@pytest.fixture
def no_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite.faulthandler, "dump_traceback_later", lambda *_, **__: None)  # pytest's own has it
    monkeypatch.setattr(suite.faulthandler, "cancel_dump_traceback_later", lambda: None)


@pytest.mark.parametrize(
    ("section", "left_s", "gpu", "keys"),
    [
        (Here("says", 60, ""), 60, Rehearsal, ["begins", "what", "ended"]),
        (Here("says", 60, "", gpus=3), 60, Rehearsal, ["skipped"]),
        (Here("says", 0.005, "", given={"count": 900}), 60, Rehearsal, ["begins", "what", "ended", "cut"]),
        (Here("raises", 60, ""), 60, Lost, ["begins", "what", "error", "lost"]),
    ],
)
def test_lines_of_a_section(
    tmp_path: Path, section: Section, left_s: int, gpu: type, keys: list[str], no_deadline: None
) -> None:
    answers = suite.run_section(tmp_path, "a section", section, time.time() + left_s, gpu())
    assert answers == (gpu is not Lost)
    lines = read_lines(tmp_path / LINES)
    seen = list(dict.fromkeys(key for line in lines for key in line if key in ("what", *keys)))
    assert seen == keys
    assert any(map(suite.failed, lines)) == ("error" in keys)


@pytest.mark.parametrize(
    ("section", "verdict"),
    [
        (Here("passes", 60, "", given={"count": 3}, least=4), "none"),
        (Here("passes", 0.005, "", given={"count": 3}, least=1), "passed"),
        (Here("raises", 60, ""), "failed"),
    ],
)
def test_verdict(
    tmp_path: Path, section: Section, verdict: str, no_deadline: None, capsys: pytest.CaptureFixture[str]
) -> None:
    suite.run_section(tmp_path, "a section", section, time.time() + 60, Rehearsal())
    assert read_lines(tmp_path / LINES)[-1]["verdict"] == verdict
    suite.report(tmp_path)
    assert f"{'no verdict' if verdict == 'none' else verdict}  a section\n" in capsys.readouterr().out


# Stands for a child: the GPU goes with section `b`, and is back for `d`.
GOES = """
import json, sys
names, file = sys.argv[sys.argv.index("--only") + 1 :], open(sys.argv[1], "a")
if names[0] == "c" or "never" in names:
    sys.exit(2)
for name in names:
    for key in ("begins", "lost" if name == "b" else "ended"):
        print(json.dumps({"section": name, key: 1}), file=file)
    if name == "b":
        sys.exit(3)
"""


@pytest.mark.parametrize(
    ("names", "code", "errors"),
    [(["a", "b", "c", "d"], 0, {"c": "the GPU is gone"}), (["never"], 2, {})],
)
def test_a_gpu_that_goes(tmp_path: Path, names: list[str], code: int, errors: dict[str, str]) -> None:
    words = [sys.executable, "-S", "-c", GOES, str(tmp_path / LINES)]
    assert suite.run_children(words, names, tmp_path, LONG_S) == code
    lines = read_lines(tmp_path / LINES)
    assert {line["section"]: line["error"] for line in lines if "error" in line} == errors
    assert [line["section"] for line in lines if "ended" in line] == (["a", "d"] if errors else [])


@pytest.mark.parametrize(
    ("name", "given", "wrong"),
    [
        ("attention", {"most": 1e-5}, 0),
        ("attention", {"most": 0.0}, 1),  # its rule can fail
        slow("recurrent", {"most": 1e-5}, 0),
        slow("recurrent", {"most": 0.0}, 3),  # whole documents are convolved alike
    ],
)
def test_rehearsed(tmp_path: Path, name: str, given: dict, wrong: int, no_deadline: None) -> None:
    section = QUARTER[name]
    section = Section(section.run, section.seconds, section.passes, given={**section.given, **given})
    assert suite.run_section(tmp_path, name, section, time.time() + LONG_S, Rehearsal())
    lines = read_lines(tmp_path / LINES)
    assert "ended" in lines[-1]
    assert any("what" in line for line in lines)
    assert sum(map(suite.failed, lines)) == wrong, lines


class Bare(Rehearsal):
    """A GPU without packages."""

    rehearsal = False


@RECURRENT
def test_packages_that_are_not_installed_are_named(tmp_path: Path) -> None:
    lines = list(QUARTER["recurrent"].lines(Bare(), tmp_path, LONG_S))
    assert [line["skipped"].split()[0] for line in lines] == [package for *_, package in FUNCTIONS.values()]


def test_the_plan() -> None:
    from bench.kernels.operators import all_operators

    assert {*OPERATORS} == {*all_operators()}
    assert len(OPERATORS) == 17
    assert len(TESTS) == 24 > QUARTER["tests"].given["least"]
    assert not QUARTER.keys() & LONGER.keys()
    assert [name for name in ALL_TESTS if not (ROOT / name).exists()] == []


def ran(*words: str) -> subprocess.CompletedProcess[str]:
    """`python -m WORDS` where this checkout is not installed: -S leaves out what finds it."""
    env = os.environ | {"PYTHONPATH": str(Path(pytest.__file__).parents[1])}
    return subprocess.run([sys.executable, "-S", "-m", *words], cwd=ROOT, env=env, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.timeout(2000)
@pytest.mark.parametrize("name", LISTS)
def test_all_of_it_in_a_plain_checkout(tmp_path: Path, name: str) -> None:
    done = ran("bench.suites.gpu", "--out", str(tmp_path), "--rehearse", "--seconds", "1500", "--list", name)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = read_lines(tmp_path / LINES)
    assert [line["section"] for line in lines if "ended" in line] == list(LISTS[name])
    assert {"rehearsal", "gpu", "versions", "commit", "hardware"} <= lines[0].keys()
    assert {LINES, LOG} <= {path.name for path in tmp_path.iterdir()}


SURVIVED = {name: Here(name, 1 if name == "hangs" else 60, "") for name in ("faults", "hangs", "raises", "says")}
THIS = "tests.bench.test_gpu_suite"


@pytest.mark.slow
def test_what_faults_or_hangs_costs_itself_only(tmp_path: Path) -> None:
    words = [sys.executable, "-m", THIS, "--out", str(tmp_path), "--rehearse"]
    assert subprocess.run(words, cwd=ROOT, capture_output=True).returncode == 1
    lines = read_lines(tmp_path / LINES)
    errors = {line["section"]: line["error"] for line in lines if "error" in line}
    assert list(errors) == ["faults", "hangs", "raises"]
    assert errors["faults"].startswith("the process ended with ")
    assert errors["raises"] == "ValueError: no such thing"
    assert [line["section"] for line in lines if "what" in line] == ["hangs", "raises", "says"]
    again = subprocess.run([*words, "--only", "says", "passes"], cwd=ROOT, capture_output=True, text=True)
    assert (again.returncode, again.stdout.count("a number")) == (0, 1), "a run is judged by its own lines"


if __name__ == "__main__":
    more = {"passes": Here("passes", 60, "", given={"count": 1})}
    suite.LISTS = {"quarter": SURVIVED, "longer": more}
    sys.exit(suite.main())
