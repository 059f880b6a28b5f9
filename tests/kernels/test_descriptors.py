"""Launchers whose kernels make tensor descriptors leave the user's allocator alone."""

from __future__ import annotations

import triton
from triton.runtime import _allocation

from odc_kernels import device
from odc_kernels.device import makes_descriptors


def test_the_users_allocator_stays() -> None:
    def users(size: int, alignment: int, stream: int | None) -> None:
        raise AssertionError("not for our kernels")

    former, seen = _allocation._allocator.get(), []
    triton.set_allocator(users)
    try:
        makes_descriptors(lambda **_: seen.append(_allocation._allocator.get()))(x=1)
        assert seen == [device._descriptor_memory]
        assert _allocation._allocator.get() is users
    finally:
        triton.set_allocator(former)
