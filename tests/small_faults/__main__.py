"""Whether the tests notice small faults: python -m tests.small_faults [NUMBER ...] [-- PYTEST'S OPTIONS]

Each patch beside this file is one small edit whose effect a user would see. It is applied to this checkout, the fast
tests of the folders that it names run until one fails, and it is taken back.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_HERE = Path(__file__).parent
_TESTS = _HERE.parent


def _is_caught(patch: Path, options: list[str]) -> bool:
    folders = next(line for line in patch.read_text().splitlines() if line.startswith("Tests: ")).split()[1:]
    paths = [str(_TESTS / folder) for folder in folders]
    subprocess.run(["git", "apply", str(patch)], check=True, cwd=_TESTS.parent)
    try:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow and not gpu", *options, *paths]
        with open(f"/dev/{'stdout' if '-v' in options else 'null'}", "w") as log:
            status = subprocess.run(command, cwd=_TESTS.parent, stdout=log, check=False).returncode
    finally:
        subprocess.run(["git", "apply", "-R", str(patch)], check=True, cwd=_TESTS.parent)
    return status in (1, 2)  # 2: by xdist


def main(arguments: list[str]) -> int:
    numbers, _, options = " ".join(arguments).partition("--")
    patches = [each for each in sorted(_HERE.glob("*.patch")) if not numbers or each.stem in numbers.split()]
    missed = []
    for patch in patches:
        caught = _is_caught(patch, options.split())
        print(patch.stem, "caught" if caught else "MISSED", patch.read_text().splitlines()[0], flush=True)
        missed += [] if caught else [patch.stem]
    print(f"{len(patches) - len(missed)} of {len(patches)} caught")
    return len(missed) > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
