"""Samples with pictures: a mixture that was fixed in a file before anything was measured.

`python -m bench.pictures` draws the file anew, the same; a test compares them.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from .provenance import ROOT

FILE = ROOT / "bench" / "data" / "pictures.json"
SEED, MINIBATCHES, SAMPLES = 51, 24, 16  # a minibatch's samples, of all ranks
COUNTS = {0: 0.5, 1: 0.3, 2: 0.1, 3: 0.06, 4: 0.04}  # a sample's pictures, and how probable so many are
TEXT, SPREAD, SHORTEST, LONGEST = 128, 0.9, 16, 1024  # tokens: the median of a log-normal, clipped
SIDES = (8, 32)  # patches: a side is log-uniform and even, as 2 x 2 patches are a token
ABOUT = (
    f"{MINIBATCHES} minibatches of {SAMPLES} samples, from seed {SEED}. Of a sample: tokens of text, log-normal with "
    f"median {TEXT} and sigma {SPREAD}, cut off at {SHORTEST} and {LONGEST}; then its pictures, height x width in "
    f"patches. By their number, how probable it is: {COUNTS}. Sides are log-uniform from {SIDES[0]} to {SIDES[1]}, and "
    f"even. All tokens are a quarter of usual ones: a median of 512, and pictures of 224 to 896 pixels a side."
)

Size = tuple[int, tuple[str, ...]]  # of a sample: tokens of text, and its pictures


def draw() -> list[list[Size]]:
    """By minibatch and sample."""
    numbers = np.random.default_rng(SEED)

    def side() -> str:
        return f"{2 * round(np.exp(numbers.uniform(*np.log(SIDES))) / 2)}"

    def sample() -> Size:
        text = int(np.clip(np.exp(numbers.normal(np.log(TEXT), SPREAD)), SHORTEST, LONGEST))
        count = numbers.choice(list(COUNTS), p=list(COUNTS.values()))
        return text, tuple(f"{side()}x{side()}" for _ in range(count))

    return [[sample() for _ in range(SAMPLES)] for _ in range(MINIBATCHES)]


def write(path: Path) -> None:
    lines = ",\n".join(f"  {json.dumps(minibatch)}" for minibatch in draw())
    path.write_text(f'{{\n "about": {json.dumps(ABOUT)},\n "minibatches": [\n{lines}\n ]\n}}\n', encoding="utf-8")


def read() -> list[list[Size]]:
    found = json.loads(FILE.read_text(encoding="utf-8"))["minibatches"]
    return [[(text, tuple(pictures)) for text, pictures in minibatch] for minibatch in found]


if __name__ == "__main__":
    write(FILE)
