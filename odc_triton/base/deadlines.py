"""Deadlines as users give them."""

from __future__ import annotations

from datetime import timedelta
from numbers import Real  # also numpy's

Timeout = timedelta | float  # a number means seconds


def timedelta_of(timeout: Timeout) -> timedelta:
    """`timeout` as a timedelta. Raises ValueError unless it is positive and finite."""
    found: object = timeout
    try:
        if isinstance(timeout, Real) and not isinstance(timeout, bool):
            found = timedelta(seconds=float(timeout))
    except (ValueError, OverflowError):  # NaN, infinity, more than a timedelta holds
        pass
    if not isinstance(found, timedelta) or found <= timedelta():
        raise ValueError(f"timeout is {timeout!r}; it must be a positive timedelta or number of seconds")
    return found
