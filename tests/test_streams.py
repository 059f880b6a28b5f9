"""What a unit's whole tensors ask of streams: by a CPU's streams that note it, in the order in which they are asked."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from odc_triton.gathered import GatheredParameters
from odc_triton.plan import ParameterSpec
from odc_triton.streams import Copies, Streams


class _Noting(Streams):
    def __init__(self) -> None:
        self.asked: list[str] = []
        self.gathered: GatheredParameters | None = None

    def _bytes(self) -> int:
        return self.gathered.whole[0].untyped_storage().nbytes()

    @contextlib.contextmanager
    def copying(self) -> Iterator[Copies]:
        assert self._bytes() > 0
        self.asked.append("copy")
        yield Copies()

    def wait(self, copies: Copies) -> None:
        self.asked.append("wait")

    def before_freeing(self, copies: Copies) -> None:
        assert self._bytes() > 0, "not freed yet"
        self.asked.append("free")


def _gathered() -> tuple[GatheredParameters, list[torch.Tensor], list[str]]:
    spec = ParameterSpec(
        names=("w",), shape=(5, 3), master_dtype="float32", compute_dtype="float32", reduce_dtype="float32", unit=""
    )
    shards = [torch.full((3, 3), 1.0), torch.full((2, 3), 2.0)]
    streams = _Noting()
    streams.gathered = GatheredParameters([spec], [shards], rank=1, streams=streams)
    return streams.gathered, shards, streams.asked


def test_filled_used_and_freed() -> None:
    gathered, shards, asked = _gathered()
    for _ in range(2):
        gathered.fetch("me", 1)
        gathered.fetch("me", 1)
        gathered.wait()
        gathered.wait()
        assert torch.equal(gathered.whole[0], torch.cat(shards))
        gathered.release("me")
        gathered.release("me")
        assert gathered.whole[0].untyped_storage().nbytes() == 0
    assert asked == ["copy", "wait", "free"] * 2


def test_fetched_ahead_in_vain() -> None:
    gathered, _, asked = _gathered()
    gathered.fetch("me", 1)
    gathered.release("me")
    assert asked == ["copy", "free"], "nobody computes with it, so nothing needs to wait but what takes its memory"


def test_filled_anew_in_its_own_memory() -> None:
    gathered, shards, asked = _gathered()
    gathered.fetch("me", 1)
    gathered.wait()
    address = gathered.whole[0].data_ptr()
    shards[0].fill_(7)
    gathered.expire()
    gathered.fetch("you", 2)
    gathered.wait()
    assert gathered.whole[0].data_ptr() == address
    assert torch.equal(gathered.whole[0], torch.cat(shards))
    gathered.release("me")
    assert gathered.is_filled
    gathered.release("you")
    assert asked == ["copy", "wait", "copy", "wait", "free"]
