"""A stream of samples as a trainer takes it: the lengths of a step's samples are known when they have been read."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Set
from dataclasses import replace
from itertools import count, islice
from typing import Any

import torch
from torch.utils.data import IterableDataset

from ...packs.collate import PackedDataset, pack_collate
from ...packs.pack_loader import measured
from ...plan.cost import CostModel
from ...plan.plan import MinibatchPacks
from ...plan.planner import make_plan
from ...plan.samples import Limits, Samples
from ...plan.tower import TowerCost


class StreamedSteps(IterableDataset):
    """Lists of `samples_per_minibatch` samples, the last of an epoch shorter or left out; epoch after epoch.

    A new epoch begins with the stream's `set_epoch`, if it has that.
    """

    def __init__(self, stream: IterableDataset, samples_per_minibatch: int, *, drop_last: bool) -> None:
        self.stream, self.samples_per_minibatch = stream, samples_per_minibatch
        self.least = samples_per_minibatch if drop_last else 1

    def __iter__(self) -> Iterator[list[Mapping[str, Any]]]:
        for epoch in count():
            if hasattr(self.stream, "set_epoch"):
                self.stream.set_epoch(epoch)
            samples, steps = iter(self.stream), 0
            while len(taken := list(islice(samples, self.samples_per_minibatch))) >= self.least:
                yield taken
                steps += 1
            if not steps:
                return  # Trainer stops, and says so

    def state_dict(self, **_: Any) -> dict[str, Any]:
        """As MinibatchSampler's, without a position: Trainer skips the steps that were taken."""
        return {"streamed": True, "samples_per_minibatch": self.samples_per_minibatch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        own = self.state_dict()
        if any(state.get(name) != value for name, value in own.items()):
            raise ValueError(
                f"the checkpoint's run took samples by {state}, and this one by {own}, which would be others: resume "
                f"with the same kind of data set and as many samples per step"
            )


def collate_step(
    samples: list[Mapping[str, Any]],
    *,
    rank: int,
    ranks: int,
    cost: CostModel,
    tower: TowerCost | None,
    untaken: Set[str],
) -> MinibatchPacks:
    """This rank's packs of a step's samples, of at most the longest one's tokens, collated. Their plan's checksum is of
    all samples' tokens.

    tower: of a model that sees images. untaken: as `measured` takes it. All can be pickled, for a worker.
    """
    lengths, _, images = measured(samples, untaken=untaken)
    limits = Limits(ranks=ranks, token_cap=max(lengths))
    extra = [tower.sample(values) for values in images] if tower else None
    plan = make_plan(Samples.of(limits.checked(lengths), cost, extra=extra), limits)
    ids = torch.cat([torch.as_tensor(sample["input_ids"]) for sample in samples])
    plan = replace(plan, checksum=zlib.crc32(ids.numpy().tobytes()))
    return pack_collate(PackedDataset(samples).__getitems__(plan.packs(rank)))
