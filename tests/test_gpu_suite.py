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

from bench.gpu_suite import (
    FOUR,
    KILLED,
    QWEN_1_5B,
    ROOT,
    STAGES,
    TESTS,
    Outcome,
    install,
    long_lengths,
    run_lengths,
    run_links,
    run_memcheck,
    run_steps,
    run_tests,
    seconds_for,
    stages_here,
    write,
)


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
    outcome = run_tests(
        _paths(tmp_path), "not gpu", dict(os.environ), 45
    )  # of which three files of four take what they need
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


def test_stages_of_their_own_are_left_out(tmp_path: Path) -> None:
    paths = _paths(tmp_path)
    outcome = run_tests([str(tmp_path)], "not gpu", dict(os.environ), 60, stage="four", without=paths[1:])
    assert outcome.stage == "four"
    assert outcome.data["counts"] == {"passed": 1}
    for path in (FOUR, KILLED):
        assert (ROOT / path).is_file()
        assert any((ROOT / path).is_relative_to(ROOT / folder) for folder in TESTS)


def test_stages_share_the_time() -> None:
    names = [stage.name for stage in STAGES]
    one, left_out = stages_here(names, gpus=1)
    assert left_out == ["lengths", "links"]
    assert stages_here(names, gpus=2) == (list(STAGES), [])
    assert [stage.name for stage in stages_here(["killed", "tests"], gpus=1)[0]] == ["tests", "killed"]
    left_s = 520.0
    for number, stage in enumerate(one):
        seconds = seconds_for(one[number:], left_s)
        # Every stage gets enough to start Python and torch on a GPU several times, even if all others use theirs up.
        assert seconds > 30, stage.name
        left_s -= seconds
    assert left_s == pytest.approx(0)
    assert seconds_for(one[-1:], 77.0) == 77.0


def test_long_lengths() -> None:
    lengths = long_lengths(5000, 8192)
    assert max(lengths) == 8192
    assert min(lengths) >= 16
    # LongAlign: 16.5 K tokens on average, at most 64 K.
    assert sum(lengths) / len(lengths) / 8192 == pytest.approx(16.5 / 64, rel=0.1)
    assert long_lengths(10, 64) == long_lengths(10, 64)


def _stand_in(folder: Path, errors: int) -> dict[str, str]:
    """An environment whose compute-sanitizer runs the command that it is given, as the real one does, and says so."""
    tool = folder / "compute-sanitizer"
    tool.write_text(
        f'#!/bin/sh\ntest "$PYTORCH_NO_CUDA_MEMORY_CACHING" = 1 || exit 3\nshift 4\n"$@"\ncode=$?\n'
        f'echo "========= ERROR SUMMARY: {errors} errors"\n[ {errors} = 0 ] || exit 99\nexit $code\n'
    )
    tool.chmod(0o755)
    return os.environ | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def test_memcheck_without_the_tool(tmp_path: Path) -> None:
    homes = {"PATH": str(tmp_path), "CUDA_HOME": "", "CUDA_PATH": ""}
    outcome = run_memcheck(os.environ | homes, 60)
    assert outcome.passed
    assert outcome.details == ["compute-sanitizer is not present"]


@pytest.mark.slow
@pytest.mark.parametrize("errors", [0, 2])
def test_memcheck(tmp_path: Path, errors: int) -> None:
    """With a stand-in for the tool and Triton's interpreter for the GPU: the command that it is given does run."""
    outcome = run_memcheck(_stand_in(tmp_path, errors), 100)
    assert outcome.data["errors"] == errors
    assert outcome.passed == (errors == 0), outcome.details
    assert any("cells passed their check" in line for line in outcome.details)


def test_memcheck_cut_short(tmp_path: Path) -> None:
    outcome = run_memcheck(_stand_in(tmp_path, 0), 2)
    assert not outcome.passed
    assert outcome.data == {"exit": None, "errors": None}


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


@pytest.mark.slow
def test_lengths_and_links_keep_what_they_have(tmp_path: Path) -> None:
    """Both stages as they are but for their sizes and the device; then cut short before they have anything."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 128}
    config = QWEN_1_5B | sizes | {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    given = ["--device", "cpu", "--rounds", "1", "--minibatches", "1", "--samples-per-rank", "1"]
    given += ["--variants", "ODC + LB-Mini"]
    lengths = run_lengths(config, given, dict(os.environ), 200, ranks=2, longest=64)
    assert lengths.passed, lengths.details
    assert lengths.data["found"]["variants"]["ODC + LB-Mini"]["tokens_per_s_per_rank"] > 0
    small = ["--backend", "cpu-apart", "--rows", "32", "--columns", "32", "--tokens", "16"]
    links = run_links(small, dict(os.environ), 100)
    assert links.passed, links.details
    assert len(links.data["found"]["links"]) == 2
    cut = run_links(small, dict(os.environ), 1)
    assert not cut.passed
    assert "stopped when its time was over" in cut.details[0]
    assert cut.data == {"exit": None, "found": None}
    assert not any("bench.links" in command for command in _running())


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
