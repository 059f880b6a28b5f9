"""The message of a refused action, and whether it is the expected one."""

from __future__ import annotations

import re
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


def net(width: int = 6) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2))


def compare(messages: dict[str, str], expected: dict[str, str]) -> None:
    assert messages.keys() == expected.keys()
    for name, pattern in expected.items():
        assert re.search(pattern, messages[name]), f"{name}: {messages[name]}"
