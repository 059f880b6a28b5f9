"""Tests with several hosts: network namespaces."""

from __future__ import annotations

import os

import pytest

from bench.suites.hosts_net import NO_NAMESPACES, why_not


def require() -> None:
    """Fails where the kernel forbids them; skips if the user left them out, which the end of the run says."""
    if os.environ.get(NO_NAMESPACES):
        pytest.skip(f"{NO_NAMESPACES} is set")
    if (reason := why_not()) is not None:
        pytest.fail(f"{reason}; {NO_NAMESPACES}=1 leaves out the tests that need network namespaces", pytrace=False)
