"""What older versions of transformers lack, for tests that are skipped on them."""

from __future__ import annotations

import pytest
import transformers
from packaging.version import Version


def is_older(oldest: str) -> bool:
    return Version(transformers.__version__).release < Version(oldest).release


def since(oldest: str, before: str) -> pytest.MarkDecorator:
    """Skips a test on an older transformers; `before`: what that one does."""
    return pytest.mark.skipif(is_older(oldest), reason=f"before transformers {oldest} {before}")


# Of models that a test builds without tests/support/hybrids.py.
RECURRENT = since("5.17", "recurrent layers call other functions")
