"""The first quarter of an hour on a GPU, without one: what is written whatever ends a section; that it all runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.device import Rehearsal
from bench.provenance import ROOT, read_lines
from bench.suites.gpu import first, parts
from bench.suites.gpu.first import SECTIONS, Section, run_section


def says(gpu: Rehearsal, *, count: int = 1) -> Iterator[dict]:
    for number in range(count):
        yield {"what": "a number", "number": number}
        time.sleep(0.01 * (count > 1))


def raises(gpu: Rehearsal) -> Iterator[dict]:
    yield {"what": "a number"}
    raise ValueError("no such thing")


def faults(gpu: Rehearsal) -> Iterator[dict]:
    os.abort()


def hangs(gpu: Rehearsal) -> Iterator[dict]:
    yield {"what": "a number"}
    time.sleep(600)


def of(run: str, seconds: float = 60.0, **given: int) -> Section:
    return Section(run=f"tests.bench.test_gpu_first.{run}", given=given, seconds=seconds, passes="")


class Lost(Rehearsal):
    def answers(self) -> bool:
        return False


@pytest.mark.parametrize(
    ("section", "left_s", "gpu", "keys"),
    [
        (of("says"), 60, Rehearsal, ["begins", "what", "ended"]),
        (of("says"), 10, Rehearsal, ["skipped"]),
        (of("says", seconds=0.005, count=900), 60, Rehearsal, ["begins", "what", "cut", "ended"]),
        (of("raises"), 60, Rehearsal, ["begins", "what", "error", "ended"]),
        (of("raises"), 60, Lost, ["begins", "what", "error", "lost"]),
    ],
)
def test_lines_of_a_section(
    tmp_path: Path, section: Section, left_s: int, gpu: type, keys: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first.faulthandler, "dump_traceback_later", lambda *_, **__: None)  # pytest's own has it
    answers = run_section(tmp_path / "lines", "a section", section, time.time() + left_s, gpu())
    assert answers == (gpu is not Lost)
    lines = read_lines(tmp_path / "lines")
    seen = list(dict.fromkeys(key for line in lines for key in line if key in ("what", *keys)))
    assert seen == keys
    assert any(map(first.failed, lines)) == ("error" in keys)


@pytest.mark.parametrize(("run", "given"), [(parts.head, {"share": 0.2}), (parts.attention, {"most": 1e-5})])
def test_parts(run: object, given: dict) -> None:
    found = list(run(Rehearsal(), **given))
    assert found
    assert all(line["passed"] for line in found), found


@pytest.mark.slow
def test_all_of_it_in_a_plain_checkout(tmp_path: Path) -> None:
    """-S leaves out what finds an installed one."""
    words = ["-S", "-m", "bench.suites.gpu.first", str(tmp_path), "--rehearse", "--seconds", "1000"]
    env = os.environ | {"PYTHONPATH": str(Path(pytest.__file__).parents[1])}
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = read_lines(tmp_path / first.LINES)
    assert [line["section"] for line in lines if "ended" in line] == list(SECTIONS)
    assert sorted(path.name for path in tmp_path.iterdir()) == [first.LOG, first.LINES][::-1]


SURVIVED = {"faults": of("faults"), "hangs": of("hangs", seconds=1), "raises": of("raises"), "says": of("says")}


@pytest.mark.slow
def test_what_faults_or_hangs_costs_itself_only(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "tests.bench.test_gpu_first", str(tmp_path), "--rehearse"]
    assert subprocess.run(words, cwd=ROOT, capture_output=True).returncode == 1
    lines = read_lines(tmp_path / first.LINES)
    errors = {line["section"]: line["error"] for line in lines if "error" in line}
    assert list(errors) == ["faults", "hangs", "raises"]
    assert errors["faults"].startswith("the process ended with ")
    assert errors["raises"] == "ValueError: no such thing"
    assert [line["section"] for line in lines if "what" in line] == ["hangs", "raises", "says"]


@pytest.mark.slow
def test_what_the_scripts_name() -> None:
    text = "".join((ROOT / f"bench/suites/gpu/run{number}.sh").read_text() for number in (1, 2))
    files = dict(re.findall(r"\b([A-Z])=(tests/\S+\.py)", text))
    ids = [files[name] + test for name, test in re.findall(r'"\$([A-Z])(::[^"]+)"', text)]
    ids += re.findall(r"(?<![=\w])tests/[\w/]+(?:\.py(?:::[^\s\"]+)?)?", text)
    words = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *ids]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert len(ids) == 29
    assert [name for name in SECTIONS if name.split()[0] not in text] == []
    assert set(re.findall(r'"(\w+ \d+\+\w+)"', text)) <= {*SECTIONS}


if __name__ == "__main__":
    SECTIONS.clear()
    SECTIONS.update(SURVIVED)
    sys.exit(first.main())
