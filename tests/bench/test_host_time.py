"""A microbatch makes none of the calls that it was rid of."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch.autograd import profiler
from torch.utils import _pytree as pytree

from bench.suites.host_time import ARMS, ROWS, WIDTH, Arm

OURS = ("views", "gathered", "replaced layers")


@contextmanager
def _calls() -> Iterator[Counter[str]]:
    """Of functions in Python, by the files that define them. On a CPU the backward is in this thread, too."""
    found: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            found[frame.f_code.co_filename] += 1

    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("name", OURS)
def test_the_calls_of_a_microbatch(name: str) -> None:
    arm, x = Arm(ARMS[name]), torch.randn(ROWS, WIDTH)
    for _ in range(2):
        arm.round(x)
    with arm.minibatch(), _calls() as calls:
        arm.model(x).sum().backward()
    package = Path(sys.modules["odc_triton"].__file__).parent
    assert any(Path(file).is_relative_to(package) for file in calls)
    assert calls[pytree.__file__] == calls[profiler.__file__] == 0
    for shape in ((WIDTH,), (WIDTH, WIDTH)):  # else torch compares specs part by part, in each of the optimizer's calls
        alike = [each for each in arm.model.parameters() if each.shape == shape]
        assert len({id(of._spec) for each in alike for of in (each, each.grad)}) == 1
