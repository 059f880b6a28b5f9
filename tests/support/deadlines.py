"""Deadlines of tests, in seconds: two kinds, so that no result depends on the machine's speed.

Where a timedelta is wanted: `timedelta(seconds=LONG_S)`.
"""

import time
from collections.abc import Callable

SHORT_S = 1.5  # of what must expire: the test waits for it
LONG_S = 300.0  # of what must not: seen only by a test that fails, below pytest's own 900 s


def until(condition: Callable[[], object], every_s: float = 0.01) -> None:
    """Returns once it holds; an assertion error after `LONG_S`."""
    deadline_s = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline_s, "what is waited for did not come"
        time.sleep(every_s)
