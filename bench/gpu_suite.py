"""Everything that only a GPU can tell, by one command: for a machine with a GPU, without network, in under 9 minutes.

    python -m bench.gpu_suite [--out bench/results] [--stages tests kernels step] [--seconds 520]

Stages, in order of worth; each writes FOLDER/gpu_<stage>.json and .md as it ends, so that a run that is cut short keeps
what it has:

    tests     the package, installed into this Python without network, then `pytest -m gpu`: two and more processes on
              one GPU through real symmetric memory (exact contention, the engine against plain torch), kernels against
              references on new random inputs
    kernels   bench.run: the kernels' benchmark, with its own checks
    step      minibatches of a model of Qwen2.5-1.5B's shape, random weights, by one and by two ranks on one GPU, with
              own and with replaced layers: where the time goes (`odc-triton profile`)

Exits with 0 if every stage passed, 1 if not, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
TESTS = (
    "tests/gpu",
    "tests/test_gathered.py",
    "tests/test_gathered_usage.py",
    "tests/test_hf_attention.py",
    "tests/kernels",
)
TESTS_SHARE = 0.6  # of the time that is left
STAGES = ("tests", "kernels", "step")
QWEN_1_5B = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
# Of the step: ranks, and how the model is changed.
STEPS = {
    "1 rank": (1, []),
    "1 rank, replaced layers": (1, ["--replace-layers", "--fused-head"]),
    "2 ranks": (2, []),
    "2 ranks, replaced layers": (2, ["--replace-layers", "--fused-head"]),
}
_TAIL_LINES = 40


@dataclass(kw_only=True)
class Outcome:
    """How a stage ended. `details`: lines for people; `data`: for the JSON file."""

    stage: str
    passed: bool
    seconds: float
    details: list[str]
    data: dict[str, Any] = field(default_factory=dict)


def install(scratch: Path) -> dict[str, str]:
    """Makes the package importable by this Python: installed by pip without network, else by a path of its own.

    Returns what it says about it, and the PYTHONPATH to run with.
    """
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    target = scratch / "site"
    done = subprocess.run([*pip, "--target", target, ROOT], capture_output=True, text=True)
    how = "pip install --no-index --no-deps"
    if done.returncode:
        how = f"by PYTHONPATH, as pip said: {(done.stderr.strip().splitlines() or ['nothing'])[-1]}"
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        (target / "odc_kernels").symlink_to(ROOT / "kernels")
        (target / "odc_triton").symlink_to(ROOT / "odc_triton")
    return {"how": how, "path": str(target)}


def read_junit(path: Path) -> tuple[Counter[str], list[dict[str, str]]]:
    """Counts by outcome, and every failure: its test and the end of its text."""
    counts: Counter[str] = Counter(passed=0, failed=0, skipped=0)
    failures = []
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        wrong = [child for child in case if child.tag in ("failure", "error")]
        if wrong:
            counts["failed"] += 1
            text = "\n".join((wrong[0].text or "").strip().splitlines()[-_TAIL_LINES:])
            failures.append({"test": f"{case.get('classname')}::{case.get('name')}", "text": text})
        else:
            counts["skipped" if case.find("skipped") is not None else "passed"] += 1
    return counts, failures


def run(command: list[str], environment: dict[str, str], seconds: float) -> tuple[int | None, str]:
    """The exit code, None where the time ran out, and all that was printed. Nothing that it started stays behind."""
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=said, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
            # Ranks of a test are in groups of their own, but of this session.
            for pid in _of_session(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
        said.seek(0)
        return code, said.read()


def _of_session(session: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if os.getsid(int(entry.name)) == session:
                found.append(int(entry.name))
    return found


def run_tests(paths: list[str], marker: str, environment: dict[str, str], seconds: float) -> Outcome:
    """`pytest -m marker paths`, as far as it comes in the time; the order of `paths` is that of their worth."""
    begin_s = time.monotonic()
    counts: Counter[str] = Counter()
    failures: list[dict[str, str]] = []
    unfinished: list[str] = []
    parallel = ["-n", str(min(8, os.cpu_count() or 1))] if importlib.util.find_spec("xdist") else []
    with tempfile.TemporaryDirectory() as scratch:
        for number, path in enumerate(paths):
            left_s = seconds - (time.monotonic() - begin_s)
            junit = Path(scratch) / f"{number}.xml"
            # Processes of one test share the GPU with each other only: what they time out on is not other tests' work.
            workers = parallel if "kernels" in path else []
            command = [sys.executable, "-m", "pytest", "-q", "-m", marker, *workers, "-p", "no:cacheprovider"]
            # Warnings are errors where versions are pinned; that machine's are its own.
            command += ["-W", "default", "--timeout", "120", f"--junit-xml={junit}", path]
            code, text = run(command, environment, max(left_s, 1))
            tail = "\n".join(text.splitlines()[-_TAIL_LINES:])
            if code is None:
                unfinished.append(path)
                failures.append({"test": f"{path}, stopped when its time was over", "text": tail})
                continue
            if not junit.exists() or code not in (0, 1, 5):  # 5: nothing was collected
                failures.append({"test": f"{path} as a whole", "text": tail})
                continue
            of_path, failed = read_junit(junit)
            counts += of_path
            failures += failed
    details = [", ".join(f"{counts[name]} {name}" for name in ("passed", "failed", "skipped"))]
    details += [f"not finished in time: {path}" for path in unfinished]
    for failure in failures:
        details += ["", f"### {failure['test']}", "", "```", failure["text"], "```"]
    return Outcome(
        stage="tests",
        passed=not (failures or unfinished) and counts["passed"] > 0,
        seconds=time.monotonic() - begin_s,
        details=details,
        data={"counts": dict(counts), "failures": failures, "unfinished": unfinished},
    )


def run_kernels(out: Path, environment: dict[str, str], seconds: float) -> Outcome:
    """bench.run, which keeps its own files up to date while it runs."""
    begin_s = time.monotonic()
    command = [sys.executable, "-m", "bench.run", "--seconds", f"{max(seconds - 20, 1):.0f}", "--out", str(out)]
    code, text = run(command, environment, seconds)
    if code is None:
        text, code = f"{text}\nstopped: it did not end by itself", 1
    return Outcome(
        stage="kernels",
        passed=code == 0,
        seconds=time.monotonic() - begin_s,
        details=["```", *text.splitlines()[-200:], "```"],
        data={"exit": code},
    )


def run_steps(config: dict[str, Any], given: list[str], environment: dict[str, str], seconds: float) -> Outcome:
    """`odc-triton profile` for each of STEPS, as far as they come in the time. `given`: its other options."""
    begin_s = time.monotonic()
    details: list[str] = []
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        init = Path(scratch) / "config.json"
        init.write_text(json.dumps(config))
        for number, (name, (ranks, changes)) in enumerate(STEPS.items()):
            out = Path(scratch) / str(number)
            command = [sys.executable, "-m", "odc_triton.cli", "profile", "--init", str(init), "--out", str(out)]
            left_s = seconds - (time.monotonic() - begin_s)
            code, text = run([*command, "--ranks", str(ranks), *changes, *given], environment, max(left_s, 1))
            report = out / "profile.json"
            found[name] = json.loads(report.read_text()) if code == 0 and report.exists() else {"exit": code}
            details += [f"## {name}", "", "```", *text.splitlines()[-_TAIL_LINES:], "```", ""]
    return Outcome(
        stage="step",
        passed=all("ranks" in each for each in found.values()),
        seconds=time.monotonic() - begin_s,
        details=details,
        data={"steps": found},
    )


def write(outcome: Outcome, about: dict[str, Any], out: Path) -> None:
    """FOLDER/gpu_<stage>.json and .md."""

    from odc_triton.trace import write_file

    record = about | {"stage": outcome.stage, "passed": outcome.passed, "seconds": round(outcome.seconds, 1)}
    write_file(out / f"gpu_{outcome.stage}.json", (json.dumps(record | outcome.data, indent=1) + "\n").encode())
    head = [f"# {outcome.stage}: {'passed' if outcome.passed else 'FAILED'} in {outcome.seconds:.0f} s", ""]
    head += [f"{key}: {value}" for key, value in about.items()] + [""]
    write_file(out / f"gpu_{outcome.stage}.md", ("\n".join(head + outcome.details) + "\n").encode())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results")
    parser.add_argument("--stages", nargs="*", choices=STAGES, default=list(STAGES))
    parser.add_argument("--seconds", type=float, default=520, help="for everything together")
    options = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        print("there is no GPU here: nothing was run. `make test` and `make aot` are what needs none", file=sys.stderr)
        return 2
    begin_s = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        installed = install(Path(scratch))
        sys.path.insert(0, installed["path"])
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([installed["path"], str(ROOT)])}
        from bench.provenance import commit, gpu, hardware, versions

        about = {
            "gpu": gpu(),
            "hardware": hardware(),
            "versions": versions(),
            "commit": commit(),
            "installed": installed["how"],
        }
        options.out.mkdir(parents=True, exist_ok=True)
        passed = True
        for number, stage in enumerate(options.stages):
            left_s = options.seconds - (time.monotonic() - begin_s)
            if stage == "tests":
                more_follow = number + 1 < len(options.stages)
                seconds = left_s * TESTS_SHARE if more_follow else left_s
                outcome = run_tests(list(TESTS), "gpu", environment, seconds)
            elif stage == "kernels":
                more_follow = number + 1 < len(options.stages)
                outcome = run_kernels(options.out, environment, left_s * TESTS_SHARE if more_follow else left_s)
            else:
                given = ["--dtype", "bf16", "--token-cap", "8192", "--samples-per-rank", "2"]
                outcome = run_steps(QWEN_1_5B, given, environment, left_s)
            write(outcome, about, options.out)
            print("\n".join([f"== {stage}: {'passed' if outcome.passed else 'FAILED'}", *outcome.details]), flush=True)
            passed = passed and outcome.passed
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
