"""`python -m bench.suites.gpu`."""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ...device import Gpu, Rehearsal
from ...provenance import about, read_lines, refuse_results, source_digest
from .. import gpu as suite
from .outcomes import LINES, Ledger, key_of, write_report
from .plan import ON_A_GPU, REHEARSAL, STAGES, Here, chosen, seconds_for
from .process import ROOT, install

_LEAST_S = 5.0  # with less time left, no stage is started
NAMES = [stage.name for stage in STAGES]


def parsed(words: list[str] | None) -> argparse.Namespace:
    about, _, more = suite.__doc__.partition("\n\n")
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m bench.suites.gpu", description=about, epilog=more, formatter_class=kind)
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"of {', '.join(NAMES)}; or report")
    parser.add_argument("--out", type=Path, default=None, help="default: out/gpu, of a rehearsal out/rehearsal")
    parser.add_argument("--seconds", type=float, default=None, help="for all stages together; default: their sum")
    parser.add_argument("--again", action="store_true", help="run also what passed before")
    parser.add_argument("--any-code", action="store_true", help="after a fix: keep what passed with the code before it")
    parser.add_argument("--rehearse", action="store_true", help="without a GPU, on tiny models; measures nothing")
    options = parser.parse_args(words)
    if unknown := set(options.stages) - {*NAMES, "report"}:
        parser.error(f"there is no stage {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}, and report")
    if "report" in options.stages and len(options.stages) > 1:
        parser.error("report is a separate command")
    if options.seconds is not None and not options.seconds > 0:
        parser.error(f"--seconds is {options.seconds}; give more than 0")
    options.out = options.out or ROOT / "out" / ("rehearsal" if options.rehearse else "gpu")
    if options.stages == ["report"] and not (options.out / LINES).exists():
        parser.error(f"{options.out} has no outcomes: nothing has run there")
    if any(
        line["about"]["rehearsal"] != options.rehearse for line in _abouts(options.out) if options.stages != ["report"]
    ):
        parser.error(f"{options.out} has outcomes of {'a GPU' if options.rehearse else 'a rehearsal'}: choose another")
    if options.rehearse:
        try:
            refuse_results(options.out)
        except ValueError as error:
            parser.error(str(error))
    return options


def _abouts(out: Path) -> list[dict[str, Any]]:
    return [line for line in read_lines(out / LINES) if line["kind"] == "about"]


def main(words: list[str] | None = None) -> int:
    begin_s = time.monotonic()
    options = parsed(words)
    device: Gpu = Rehearsal() if options.rehearse else Gpu()
    if options.stages != ["report"] and not device.count():
        print("there is no GPU here: nothing was run. `make test` and `make aot` need none,", file=sys.stderr)
        print("and --rehearse shows whether this command itself works", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        # Keep this checkout's folder first on the path, so that it is what runs.
        installed = install(Path(scratch))
        sys.path.append(installed["path"])
        environment = device.environment()
        environment["PYTHONPATH"] = os.pathsep.join([installed["path"], str(ROOT)])
        if options.stages == ["report"]:
            if (options.out / "kernels.jsonl").exists():  # its tables may be older than its lines
                command = [sys.executable, "-m", "bench.kernels.run", "--report", "--out", str(options.out)]
                subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=False)
            return _report(options.out)
        now = {
            "kernel": platform.release(),
            "rehearsal": options.rehearse,
            "gpu": device.about(),
            "gpus": device.count(),
            **about(),
            "source": source_digest(),
            "installed": installed["how"],
            "when": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
        for name, value in now.items():
            print(f"{name}: {value}", flush=True)
        ledger = Ledger(folder=options.out, key=key_of(now), any_code=options.any_code)
        ledger.add("about", about=now)
        given = REHEARSAL if options.rehearse else ON_A_GPU
        here = Here(ledger=ledger, given=given, environment=environment, gpus=device.count(), again=options.again)
        stages, others = chosen(options.stages, here.gpus)
        for name in others:
            print(f"== {name}: not run, it needs more GPUs than there are", flush=True)
        seconds = options.seconds or sum(stage.seconds for stage in stages)
        return _run(here, stages, begin_s + seconds)


def _run(here: Here, stages: list[Any], deadline_s: float) -> int:
    passed = bool(stages)
    while stages:
        stage = stages.pop(0)
        if here.ledger.stage(stage.name).passed and not here.again and stage.name != "kernels-timed":
            print(f"== {stage.name}: passed before", flush=True)
            continue
        left_s = deadline_s - time.monotonic()
        if left_s < _LEAST_S:
            print(f"== no time left for {', '.join(s.name for s in [stage, *stages])}", flush=True)
            return 1
        begin_s, seconds = time.monotonic(), seconds_for([stage, *stages], left_s)
        print(f"== {stage.name}: {seconds:.0f} s at most", flush=True)
        here.ledger.add("begin", stage=stage.name, seconds=round(seconds))
        ending = stage.run(here, stage.name, seconds)
        here.ledger.add("end", stage=stage.name, seconds=round(time.monotonic() - begin_s, 1), **ending)
        _report(here.ledger.folder, show=stage.name)
        passed = passed and ending["passed"]
    return 0 if passed else 1


def _report(out: Path, show: str | None = None) -> int:
    """Rebuilds the suite's files from the existing lines; prints one stage, or everything."""
    write_report(out, NAMES)
    text = (out / "gpu_suite.md").read_text()
    if show is not None:
        text = f"## {show}:" + text.partition(f"\n## {show}:")[2].partition("\n## ")[0].partition("\n# ")[0]
    print(text.rstrip(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
