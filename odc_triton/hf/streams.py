"""A stream of samples as a trainer takes it: of each step the lengths are known when its samples have been read."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from ..balance.collate import pack_collate
from ..balance.pieces import MinibatchPacks
from ..balance.strategies import Packs
from ..balance.tower import TowerCost
from ..base.errors import RanksDiffer
from .pack_loader import measured


class StreamedPacks(IterableDataset):
    """This rank's packs of each minibatch, collated, epoch after epoch.

    Every rank reads the whole stream. A minibatch is the next `samples_per_minibatch`; its packs have at most the
    tokens of its longest sample. At its end the stream begins anew, after `set_epoch` if it has that.

    assign: `assign_one` of this rank, without lengths, cap and extra costs. tower: of a model that sees pictures.
    """

    def __init__(
        self,
        stream: IterableDataset,
        samples_per_minibatch: int,
        *,
        assign: Callable[..., Packs],
        tower: TowerCost | None,
        drop_last: bool,
    ) -> None:
        self.stream, self.samples_per_minibatch, self.assign, self.tower = stream, samples_per_minibatch, assign, tower
        self.least = samples_per_minibatch if drop_last else 1

    def loader(self, **options: Any) -> DataLoader:
        """A DataLoader of minibatches."""
        return DataLoader(self, batch_size=None, collate_fn=_as_it_is, **options)

    def __iter__(self) -> Iterator[MinibatchPacks]:
        for epoch in count():
            if hasattr(self.stream, "set_epoch"):
                self.stream.set_epoch(epoch)
            samples = iter(self.stream)
            taken = list(islice(samples, self.samples_per_minibatch))
            if len(taken) < self.least:
                return  # Trainer stops, and says so
            while len(taken) >= self.least:
                yield self._packs(taken)
                taken = list(islice(samples, self.samples_per_minibatch))

    def _packs(self, samples: list[Mapping[str, Any]]) -> MinibatchPacks:
        lengths, _, pictures = measured(samples)
        extra = [self.tower.sample(values) for values in pictures] if self.tower else None
        own = self.assign(lengths, token_cap=max(lengths), extra=extra)
        packs = pack_collate([[samples[i] for i in pack] for pack in own])
        packs.samples, packs.checksum = len(samples), 0  # of all ranks' samples
        for sample in samples:
            packs.checksum = zlib.crc32(torch.as_tensor(sample["input_ids"]).numpy().tobytes(), packs.checksum)
        return packs


def refuse_other_streams(checksums: Sequence[int | None]) -> None:
    """Raises RanksDiffer unless all ranks' minibatches had the same samples."""
    for rank, checksum in enumerate(checksums):
        if checksum != checksums[0]:
            raise RanksDiffer(
                f"rank {rank} read other samples than rank 0: give every rank the same stream as train_dataset, by the "
                f"same seed and not split by rank; the trainer assigns its samples to the ranks"
            )


def _as_it_is(packs: MinibatchPacks) -> MinibatchPacks:
    return packs
