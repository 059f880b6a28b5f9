from __future__ import annotations

import math
import re
from datetime import timedelta

import pytest

from odc_triton.base.deadlines import timedelta_of


@pytest.mark.parametrize("given", [90, 90.0, timedelta(minutes=1, seconds=30)])
def test_numbers_mean_seconds(given) -> None:
    assert timedelta_of(given) == timedelta(seconds=90)


@pytest.mark.parametrize("given", [0, -1.5, math.nan, math.inf, 1e300, True, "30", None, timedelta(), timedelta(-1)])
def test_refused(given) -> None:
    with pytest.raises(ValueError, match=re.escape(f"timeout is {given!r}; it must be a positive timedelta or number")):
        timedelta_of(given)
