"""`python -m bench.gpu_suite`."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import bench.gpu_suite as suite
from bench.gpu_suite.plan import Here

_LEAST_S = 10.0  # what it makes no sense to begin a stage with less than


def main() -> int:
    names = [stage.name for stage in suite.STAGES]
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_suite", description=suite.__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=suite.ROOT / "bench" / "results")
    parser.add_argument("--stages", nargs="*", choices=names, default=names)
    parser.add_argument("--seconds", type=float, default=520, help="for everything together")
    options = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        print("there is no GPU here: nothing was run. `make test` and `make aot` are what needs none", file=sys.stderr)
        return 2
    begin_s = time.monotonic()
    stages, others = suite.stages_here(options.stages, torch.cuda.device_count())
    for name in others:
        print(f"== {name}: not run, it needs more GPUs than there are", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        installed = suite.install(Path(scratch))
        sys.path.insert(0, installed["path"])
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([installed["path"], str(suite.ROOT)])}
        from bench.provenance import commit, gpu, hardware, versions

        about = {
            "gpu": gpu(),
            "gpus": torch.cuda.device_count(),
            "hardware": hardware(),
            "versions": versions(),
            "commit": commit(),
            "installed": installed["how"],
        }
        options.out.mkdir(parents=True, exist_ok=True)
        here = Here(out=options.out, environment=environment, gpus=torch.cuda.device_count())
        passed = True
        while stages:
            left_s = options.seconds - (time.monotonic() - begin_s)
            if left_s < _LEAST_S:
                print(f"== no time left for {', '.join(stage.name for stage in stages)}", flush=True)
                return 1
            stage, seconds = stages[0], suite.seconds_for(stages, left_s)
            outcome = stage.run(here, seconds)
            suite.write(outcome, about, options.out)
            verdict = "passed" if outcome.passed else "FAILED"
            print("\n".join([f"== {stage.name}: {verdict}", *outcome.details]), flush=True)
            passed = passed and outcome.passed
            stages = stages[1:]
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
