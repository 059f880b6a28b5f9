"""Runs all property tests on fresh random examples: python -m tests.search --minutes 30

`make test` draws the same examples in every run. Here each round draws others, from a seed that it prints first. The
first round that fails ends it: its report has the falsifying example, to add as an `@example` with the fix. The same
seed finds it again: python -m tests.search --seed SEED
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 0, or pytest's of the round that failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.search", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=0.0, help="start rounds for so long; by default one")
    parser.add_argument("--seed", type=int, help="of the first round")
    parser.add_argument("paths", nargs="*", default=["tests"], help="files or folders of tests")
    given = parser.parse_args(arguments)
    pytest = [sys.executable, "-m", "pytest", "-q", "-m", "hypothesis and not gpu", "-n", "2", "--dist", "loadfile"]
    begun_s, seed = time.monotonic(), given.seed
    while True:
        seed = random.SystemRandom().randrange(2**32) if seed is None else seed
        print(f"seed {seed}", flush=True)
        environment = os.environ | {"ODC_TEST_EXAMPLES": "search"}
        ended = subprocess.run([*pytest, f"--hypothesis-seed={seed}", *given.paths], env=environment)
        if ended.returncode or time.monotonic() - begun_s > 60 * given.minutes:
            return ended.returncode
        seed = None


if __name__ == "__main__":
    sys.exit(main())
