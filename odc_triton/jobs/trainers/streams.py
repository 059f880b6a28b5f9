"""A stream of samples as a trainer takes it: the lengths of a step's samples are known when they have been read."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from itertools import count, islice
from typing import Any

import torch
from torch.utils.data import IterableDataset

from ...base.errors import RanksDiffer
from ...packs.collate import pack_collate
from ...packs.pack_loader import measured
from ...plan.plan import MinibatchPacks
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
    samples: list[Mapping[str, Any]], *, assign: Callable, tower: TowerCost | None, untaken: Set[str]
) -> MinibatchPacks:
    """This rank's packs of a step's samples, collated. Their `checksum` is of all samples, which ranks have to share.

    assign: `assign_one` of this rank, which gets lengths, their longest as `token_cap`, and `extra`. tower: of a model
    that sees pictures. untaken: as `measured` takes it. All can be pickled, for a DataLoader's worker.
    """
    lengths, _, pictures = measured(samples, untaken=untaken)
    extra = [tower.sample(values) for values in pictures] if tower else None
    own = assign(lengths, token_cap=max(lengths), extra=extra)
    packs = pack_collate([[samples[i] for i in pack] for pack in own])
    ids = torch.cat([torch.as_tensor(sample["input_ids"]) for sample in samples])
    packs.samples, packs.checksum = len(samples), zlib.crc32(ids.numpy().tobytes())
    return packs


def refuse_other_samples(checksums: Sequence[Any], name: str = "train_dataset") -> None:
    """Raises RanksDiffer unless all ranks have assigned the same samples; None where they are unknown."""
    for rank, checksum in enumerate(checksums):
        if checksum != checksums[0]:
            raise RanksDiffer(
                f"rank {rank} has other samples than rank 0: give every rank the same {name} in the same order, "
                f"with the same seed and not split by rank; the trainer assigns its samples to the ranks"
            )
