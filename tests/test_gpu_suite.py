"""The GPU suite's plumbing, on a machine without a GPU: it runs real pytest and writes what it says."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bench.gpu_suite import QWEN_1_5B, ROOT, Outcome, install, run_steps, run_tests, write


def _paths(folder: Path) -> list[str]:
    (folder / "test_good.py").write_text("def test_good():\n    pass\n")
    (folder / "test_mixed.py").write_text(
        "import pytest\n\ndef test_bad():\n    assert 1 == 2, 'no luck'\n\n"
        "@pytest.mark.skip(reason='not here')\ndef test_skipped():\n    pass\n"
    )
    (folder / "test_broken.py").write_text("import no_such_module\n")
    (folder / "test_slow.py").write_text("import time\n\ndef test_slow():\n    time.sleep(60)\n")
    return [str(folder / f"test_{name}.py") for name in ("good", "mixed", "broken", "slow")]


def test_every_outcome_is_told(tmp_path: Path) -> None:
    outcome = run_tests(_paths(tmp_path), "not gpu", dict(os.environ), 20)
    assert not outcome.passed
    assert outcome.data["counts"] == {"passed": 1, "failed": 1, "skipped": 1}
    bad, broken, late = outcome.data["failures"]
    assert "test_bad" in bad["test"]
    assert "no luck" in bad["text"]
    assert "no_such_module" in broken["text"]
    assert outcome.data["unfinished"] == [str(tmp_path / "test_slow.py")]
    assert "slow" in late["test"]
    assert not any("test_slow.py" in command for command in _running())
    assert outcome.details[0] == "1 passed, 1 failed, 1 skipped"


def _running() -> Iterator[str]:
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            yield entry.read_text()


def test_nothing_collected_is_no_success(tmp_path: Path) -> None:
    (tmp_path / "test_good.py").write_text("def test_good():\n    pass\n")
    assert not run_tests([str(tmp_path)], "gpu", dict(os.environ), 60).passed
    assert run_tests([str(tmp_path)], "not gpu", dict(os.environ), 60).passed


def test_files(tmp_path: Path) -> None:
    outcome = Outcome(stage="tests", passed=False, seconds=1.25, details=["one line"], data={"counts": {"failed": 1}})
    write(outcome, {"commit": "abc"}, tmp_path)
    assert json.loads((tmp_path / "gpu_tests.json").read_text()) == {
        "commit": "abc",
        "stage": "tests",
        "passed": False,
        "seconds": 1.2,
        "counts": {"failed": 1},
    }
    text = (tmp_path / "gpu_tests.md").read_text()
    assert "FAILED" in text
    assert "commit: abc" in text
    assert "one line" in text


@pytest.mark.slow
def test_steps_are_profiled() -> None:
    """The stage as it is but for its model and the device."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 128}
    config = QWEN_1_5B | sizes | {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    given = ["--token-cap", "32", "--samples-per-rank", "1", "--minibatches", "1"]
    outcome = run_steps(config, given, dict(os.environ), 200)
    assert outcome.passed, outcome.details
    assert [len(step["ranks"]) for step in outcome.data["steps"].values()] == [1, 1, 2, 2]
    assert sum("matrix products" in line for line in outcome.details) == 4
    broken = run_steps(config, ["--token-cap", "1"], dict(os.environ), 60)
    assert not broken.passed
    assert "token_cap is 1" in "\n".join(broken.details)


def test_installed_without_network(tmp_path: Path) -> None:
    installed = install(tmp_path)
    code = "import odc_kernels.peers, odc_triton.plan; print(odc_kernels.__path__[0])"
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    done = subprocess.run([sys.executable, "-m", "bench.gpu_suite"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "no GPU" in done.stderr
