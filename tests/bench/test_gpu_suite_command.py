"""The GPU suite's command on a machine without a GPU: what it refuses, how it goes on after a kill.

What the stages run is rehearsed whole by a slow test.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.provenance import RESULTS, WARNING, read_lines
from bench.suites.gpu.__main__ import NAMES, main
from bench.suites.gpu.outcomes import LINES
from bench.suites.gpu.process import ROOT, run
from tests.bench.test_gpu_suite import ENVIRONMENT, ledger_in, running


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["no-such"], "there is no stage no-such; there are checks, kernels-right"),
        (["report", "checks"], "report is a separate command"),
        (["--rehearse", "--out", str(RESULTS / "new")], "measures nothing: .* choose another folder"),
        (["--rehearse", "--out", "of a GPU"], "has outcomes of a GPU: choose another"),
    ],
)
def test_refusals(words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    ledger_in(tmp_path).add("about", about={"rehearsal": False})
    with pytest.raises(SystemExit) as stopped:
        main([str(tmp_path) if word == "of a GPU" else word for word in words])
    assert stopped.value.code == 2
    assert re.search(said, capsys.readouterr().err)
    assert not (RESULTS / "new").exists()


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "bench.suites.gpu", *words]


def rehearse(out: Path, *words: str) -> subprocess.CompletedProcess:
    told = command("--rehearse", "--out", str(out), *words)
    return subprocess.run(told, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=580)


@pytest.mark.slow
def test_killed_at_any_moment_it_goes_on(tmp_path: Path) -> None:
    """The whole command: SIGKILL in the middle of a stage, a report of what is there, then the rest by its clock."""
    cells = tmp_path / "kernels.jsonl"
    told = command("--rehearse", "--out", str(tmp_path), "kernels-timed")
    with subprocess.Popen(told, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.DEVNULL) as process:
        begin_s, deadline_s = time.monotonic(), time.monotonic() + 240
        while sum("cell" in line for line in read_lines(cells)) < 2:
            assert process.poll() is None
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        took_s = time.monotonic() - begin_s
        process.send_signal(signal.SIGKILL)
    while list(running(str(tmp_path))):
        assert time.monotonic() < deadline_s, "what it had started dies with it"
        time.sleep(0.05)
    before = [line["cell"] for line in read_lines(cells) if "cell" in line]

    (tmp_path / "kernels.json").unlink(missing_ok=True)
    done = subprocess.run(command("report", "--out", str(tmp_path)), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(WARNING)
    machine = json.loads((tmp_path / "gpu_suite.json").read_text())["machines"][0]
    assert machine["stages"]["kernels-timed"]["verdict"] == "killed before its end"
    assert {"kernel", "versions", "commit", "hardware", "gpu"} <= machine["about"].keys()
    assert json.loads((tmp_path / "kernels.json").read_text())["cells"] == before

    seconds = round(1.5 * took_s) + 10  # enough for more than two cells; on a slow machine not for all
    done = rehearse(tmp_path, "--seconds", str(seconds), "kernels-timed")
    assert done.returncode == 0, done.stdout + done.stderr
    machine = json.loads((tmp_path / "gpu_suite.json").read_text())["machines"][0]
    assert machine["stages"]["kernels-timed"]["seconds"] <= seconds
    data = json.loads((tmp_path / "kernels.json").read_text())
    assert data["rehearsal"] is True
    assert data["cells"][: len(before)] == before, "measured cells are kept"
    assert len(data["cells"]) > len(before)
    assert (tmp_path / "kernels.md").read_text().startswith(WARNING)


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    environment = ENVIRONMENT | {"HOME": str(tmp_path)}
    code, said = run(command("--out", str(tmp_path)), environment, 60)
    assert code == 2
    assert "no GPU" in said
    assert not (tmp_path / LINES).exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_whole_rehearsal(tmp_path: Path) -> None:
    done = rehearse(tmp_path, *NAMES)
    assert done.returncode == 0, done.stdout + done.stderr
    data = json.loads((tmp_path / "gpu_suite.json").read_text())
    assert data["rehearsal"] is True
    (machine,) = data["machines"]
    assert {name: stage["verdict"] for name, stage in machine["stages"].items()} == dict.fromkeys(NAMES, "passed")
    curves = [found["data"]["losses"] for found in machine["stages"]["train"]["runs"].values()]
    assert [len(curve) for curve in curves] == [100, 100]
    assert (tmp_path / "gpu_suite.md").read_text().startswith(WARNING)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) <= 6
    assert max(path.stat().st_size for path in files) < 1 << 20
    assert "passed before" in rehearse(tmp_path, "checks").stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["report"], "has no outcomes: nothing has run there"),
        (["checks", "--rehearse", "--seconds", "-3"], "--seconds is -3.0; give more than 0"),
    ],
)
def test_words_that_can_not_be(words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from bench.suites.gpu.__main__ import parsed

    with pytest.raises(SystemExit):
        parsed([*words, "--out", str(tmp_path)])
    assert said in capsys.readouterr().err
