from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.support import place


@pytest.fixture
def on_device() -> Iterator[None]:
    """New tensors are made on the device under test; on a GPU from a fresh seed, which a failure prints."""
    if place.INTERPRETED:
        yield
        return
    seed = torch.seed()
    print(f"torch.manual_seed({seed})")
    torch.manual_seed(seed)
    with torch.device(place.DEVICE):
        yield


@pytest.fixture(autouse=True)
def nothing_is_stored_beside_the_shards() -> Iterator[None]:
    place.guarded.clear()
    yield
    assert all(map(place.is_intact, place.guarded))
