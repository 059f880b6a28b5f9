"""`python -m bench.suites.gpu`."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from odc_triton.base.report import table
from odc_triton.comm.launch import die_with_parent

from ...device import Gpu, Rehearsal
from ...provenance import RESULTS, ROOT, WARNING, about, read_lines, save_json, source_digest
from .. import gpu as suite
from .inputs import write_inputs
from .paths import make_importable
from .plan import FIRST, STAGES, Run, Stages

_LEAST_S = 5.0  # with less time left, nothing is started
_CUT = (124, 128 + signal.SIGKILL)  # `timeout`'s exit codes
_TOOL = "compute-sanitizer"  # runs of which need it


def parsed(words: list[str] | None, stages: Stages) -> argparse.Namespace:
    head, _, more = suite.__doc__.partition("\n\n")
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m bench.suites.gpu", description=head, epilog=more, formatter_class=kind)
    parser.add_argument("names", nargs="*", metavar="STAGE", help=f"of {', '.join(stages)}; STAGE/RUN; or report")
    parser.add_argument("--out", type=Path, default=None, help="default: out/gpu, of a rehearsal out/rehearsal")
    parser.add_argument("--seconds", type=float, default=590.0, help="for all together; default: 590")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, on tiny models; measures nothing")
    options = parser.parse_args(words)
    options.out = (options.out or ROOT / "out" / ("rehearsal" if options.rehearse else "gpu")).resolve()
    known = {*stages, *(f"{stage}/{run}" for stage, runs in stages.items() for run in runs)}
    if options.names != ["report"] and (unknown := set(options.names) - known):
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(stages)}, and report alone")
    if options.names == ["report"] and not (options.out / "gpu_suite.json").exists():
        parser.error(f"{options.out} has no gpu_suite.json: nothing has run there")
    if not options.seconds > 0:
        parser.error(f"--seconds is {options.seconds}; give more than 0")
    if options.rehearse and options.out.is_relative_to(RESULTS):
        parser.error(f"a rehearsal measures nothing: {options.out} is in {RESULTS}, choose another folder")
    return options


class Report:
    """gpu_suite.json: the last outcome of every run, and what its `key` stands for: code, GPU and versions."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "gpu_suite.json"
        self.data: dict[str, Any] = read(self.file) or {"about": {}, "runs": {}}

    def save(self) -> None:
        save_json(self.file, self.data)

    def text(self) -> str:
        machines, runs = self.data["about"], self.data["runs"]
        lines = [WARNING] * any(facts["rehearsal"] for facts in machines.values())
        lines += [f"{key}: {facts['gpu']['name']}, commit {facts['commit']}" for key, facts in machines.items()]
        rows = [
            [name, run["verdict"], run["seconds"], in_short(run["found"]), run["key"]] for name, run in runs.items()
        ]
        lines += ["", table(rows, ("run", "verdict", "seconds", "found", "code"))]
        for name, run in runs.items():
            tests = run["found"] if isinstance(run["found"], list) else []
            failed = [test for test in tests if test.get("outcome") == "failed"]
            lines += [f"\n{name}, {test['test']}:\n{test['text']}" for test in failed]
            lines += [f"\n{name} said last:\n{run['said']}"] * bool(run["said"])
        return "\n".join(lines)


def in_short(found: Any) -> str:
    if not isinstance(found, list):
        return "" if found is None else "data"
    outcomes = [test["outcome"] for test in found if "outcome" in test]
    return ", ".join(f"{outcomes.count(name)} {name}" for name in sorted(set(outcomes))) or f"{len(found)} lines"


def read(file: Path) -> Any:
    """What a run has found so far: JSON, written whole, or lines of it; None if nothing."""
    lines = file.suffix == ".jsonl"
    return (read_lines(file) if lines else json.loads(file.read_text())) if file.is_file() else None


def do(
    name: str, run: Run, words: tuple[str, ...], report: Report, key: str, env: dict[str, str], left_s: float
) -> bool:
    """One run, with all its tries, for `left_s` seconds at most; whether it passed."""
    out = report.file.parent
    folder, begin_s = out / "runs" / name.replace("/", "-").replace(" ", "-"), time.monotonic()
    if run.tries == 1:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    words = tuple(word.replace("{out}", str(folder)).replace("{inputs}", str(out / "inputs")) for word in words)
    env = env | {"ODC_SUITE_TESTS": str(folder / "tests.jsonl")}
    until_s, log, found, code = begin_s + min(left_s, run.seconds), folder / "log", None, _CUT[0]
    record = {"verdict": "killed", "key": key, "seconds": 0.0, "exit": None, "found": None, "said": ""}
    report.data["runs"][name] = record
    report.save()
    for _ in range(run.tries):
        if (left_s := until_s - time.monotonic()) < _LEAST_S:
            break
        command, code = ["timeout", "-k", "10", f"{left_s:.1f}", *run.under, sys.executable, "-m", *words], None
        # All that it starts ends with it, and with this process: `timeout` passes on the signal that it then gets.
        how = {"start_new_session": True, "preexec_fn": partial(die_with_parent, None, signal.SIGTERM)}
        with log.open("w") as file:
            process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=file, stderr=subprocess.STDOUT, **how)
        while code is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(0.5)
            found = read(folder / run.found) if run.found else None
            if found != record["found"] or code is not None:
                said = "\n".join(log.read_text(errors="replace").splitlines()[-60:])
                record |= {"found": found, "said": said, "exit": code, "seconds": round(time.monotonic() - begin_s, 1)}
                report.save()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        if code in (0, *_CUT):
            break
    good = code == 0 and (not run.found or (found is not None and run.passes(found)))
    verdict = "passed" if good else "cut short" if code in _CUT else "FAILED"
    record |= {"verdict": verdict, "said": "" if good else record["said"]}
    report.save()
    print(f"{name}: {record['verdict']} in {record['seconds']} s, {in_short(record['found'])}", flush=True)
    return good


def lacks(run: Run, given: tuple[str, ...], device: Gpu) -> str:
    """Why a run can't be started here; "" if it can."""
    if not given:
        return "there is nothing of it to rehearse"
    if run.gpus > device.count():
        return f"it needs {run.gpus} GPUs; here: {device.count()}"
    return f"{_TOOL} is not installed" if run.under and shutil.which(_TOOL) is None else ""


def main(words: list[str] | None = None, stages: Stages = STAGES) -> int:
    begin_s, options = time.monotonic(), parsed(words, stages)
    report = Report(options.out)
    if options.names == ["report"]:
        print(report.text())
        return 0
    device: Gpu = Rehearsal() if options.rehearse else Gpu()
    if not device.count():
        print("there is no GPU here: nothing was run; --rehearse tries this command without one", file=sys.stderr)
        return 2
    make_importable(options.out / "site")
    environment = device.environment()
    write_inputs(options.out / "inputs", rehearse=options.rehearse)
    facts = {"rehearsal": options.rehearse, "gpu": device.about(), "gpus": device.count(), **about()}
    facts |= {"source": source_digest(), "when": time.strftime("%Y-%m-%d %H:%M:%S")}
    # A result of other code, another GPU or torch proves nothing here.
    same = [facts["gpu"]["name"], *(facts[name] for name in ("source", "versions", "gpus", "rehearsal"))]
    key = hashlib.sha256(json.dumps(same, sort_keys=True).encode()).hexdigest()[:12]
    report.data["about"][key] = facts
    passed, names = True, options.names or FIRST
    chosen = {f"{stage}/{name}": run for stage, runs in stages.items() for name, run in runs.items()}
    for name, run in chosen.items():
        if name not in names and name.partition("/")[0] not in names:
            continue
        before, given = report.data["runs"].get(name, {}), run.rehearsal if options.rehearse else run.words
        left_s = begin_s + options.seconds - time.monotonic()
        if before.get("verdict") == "passed" and before["key"] == key:
            print(f"{name}: passed before", flush=True)
        elif lacking := lacks(run, given, device):
            print(f"{name}: not run here: {lacking}", flush=True)
        elif left_s < _LEAST_S:
            print(f"{name}: not run, there is no time left", flush=True)
            passed = False
        else:
            passed &= do(name, run, given, report, key, environment, left_s)
    print(report.text(), flush=True)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
