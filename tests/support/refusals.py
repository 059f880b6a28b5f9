"""The message of a refused action, and whether it is the expected one; how an action ends on a rank."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import torch
from torch import nn


def caught(action: Callable[[], object]) -> str:
    """What an action says that must not succeed."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def ended(action: Callable[[], object]) -> tuple[str, list[int], str, float]:
    """The kind of an action's error, the ranks that it names, its text; and how many seconds the action took."""
    start_s, end = time.monotonic(), ("no error", [], "")
    try:
        action()
    except (RuntimeError, ValueError, MemoryError, KeyboardInterrupt, SystemExit) as error:
        end = type(error).__name__, getattr(error, "ranks", []), str(error)
    return *end, time.monotonic() - start_s


def net(width: int = 6) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2))


def compare(messages: dict[str, str], expected: dict[str, str]) -> None:
    assert messages.keys() == expected.keys()
    for name, pattern in expected.items():
        assert re.search(pattern, messages[name]), f"{name}: {messages[name]}"
