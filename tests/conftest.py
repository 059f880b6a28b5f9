"""Decides, before anything imports triton, where kernels run: see bench/kernels/problem.py."""

import os
import sys
from collections.abc import Iterator

import pytest

pytest.register_assert_rewrite("tests.support")
from tests.support import place as place  # noqa: E402

os.environ["ODC_TUNED"] = "off"  # what the tests measure must not depend on what was tuned here


@pytest.fixture(autouse=True)
def _no_process_group_stays() -> Iterator[None]:
    """A test that shards a model in this process makes a world of one, as a notebook does."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()
