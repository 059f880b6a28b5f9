"""What test files share."""

from __future__ import annotations

from typing import Any

import pytest


def slow(*case: object) -> Any:
    """A case for `parametrize` that `make test` leaves to `make test-slow`."""
    return pytest.param(*case, marks=pytest.mark.slow)
