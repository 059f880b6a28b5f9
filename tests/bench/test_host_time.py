"""The ways of the bench of host time train alike, and a microbatch makes none of the calls that it was rid of."""

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

from bench.suites.host_time import ARMS, PLAIN, ROWS, WIDTH, Arm
from bench.whole import whole
from tests.support import ranks

OURS = ("views", "gathered", "replaced layers")


def _train(rank: int, world: int, name: str) -> list[torch.Tensor]:
    arm = Arm(ARMS[name])
    for _ in range(2):
        arm.round(torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH))
    return [whole(each.detach()) for each in arm.model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_all_ways_train_alike(world: int) -> None:
    plain, *others = (found[0] for found in ranks.run_all(world, *((_train, name) for name in (PLAIN, *ARMS))))
    for name, found in zip(ARMS, others, strict=True):
        for ours, theirs in zip(found, plain, strict=True):  # AdamW's first steps have the size of the learning rate
            torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5, msg=name)


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
