"""Deadlines of tests, in seconds: two kinds, so that no result depends on the machine's speed.

Where a timedelta is wanted: `timedelta(seconds=LONG_S)`.
"""

SHORT_S = 1.5  # of what must expire: the test waits for it
LONG_S = 300.0  # of what must not: seen only by a test that fails, below pytest's own 900 s
