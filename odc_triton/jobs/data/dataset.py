"""Samples: records as one compact array of tokens on disk, with the targets marked.

Labels follow the convention of transformers: equal to `input_ids` where a token is a target, -100 elsewhere,
not shifted. All tokens of a text are targets; of a prompt and its completion, the completion's and the end
token; of a conversation, the assistant's (see `chat`). A sample's first token has none before it and is never
predicted: it is not counted as a target, and a sample with no other target is dropped.

Memory does not grow with the data: samples go to disk as they are made, and are read by memory mapping, whose
pages all ranks of a machine share. Only a few bytes per sample, its length, stay in memory.

`split_samples` sets some aside for evaluation. The choice depends only on the seed and the number of samples: not on
ranks, world size, epochs or the order in which a sampler takes the others.
"""

from __future__ import annotations

import operator
import os
import random
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from itertools import chain, pairwise
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Literal

import numpy as np

from ...plan.fields import IGNORED
from .chat import CHARACTERS_PER_TOKEN
from .encode import Encoded, batches, encode_records
from .records import IMAGE_CHARACTERS, DataError, Record
from .shown import COLUMNS as IMAGE_COLUMNS
from .shown import ShownImages, ShownWriter
from .sources import RecordSource
from .store import column_of, map_arrays, save_arrays
from .tokenizer import TextEncoder
from .vision import VisionProcessor

TooLong = Literal["error", "truncate", "drop"]

_COLUMNS = {"tokens": np.dtype("int32"), "offsets": np.dtype("int64"), "spans": np.dtype("int64")}


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Options of turning records into samples."""

    max_tokens: int = 2048  # of the longest sample, prompt and end token included
    too_long: TooLong = "truncate"  # or stop with an error, or leave it out
    pairs: bool = False  # records 2i and 2i + 1 are one: both give a sample, or neither; together of max_tokens

    def __post_init__(self) -> None:
        # A sample needs a token to predict and one to predict it from.
        if self.max_tokens < 2:
            raise ValueError(f"max_tokens is {self.max_tokens}; it must be at least 2 tokens")


@dataclass(kw_only=True)
class DataSummary:
    """Counts of one preparation, in samples unless named otherwise."""

    records: int = 0
    samples: int = 0
    truncated: int = 0  # samples that were cut at their end
    dropped_too_long: int = 0  # also those whose images a cut would damage
    dropped_no_target: int = 0  # an empty text, if none begins it; no turn of the assistant; a prompt of max_tokens
    tokens: int = 0
    target_tokens: int = 0

    def shapes(self, spans: int) -> dict[str, tuple[int, ...]]:
        """The shapes of a data set's arrays with this number of spans of targets."""
        return {"tokens": (self.tokens,), "offsets": (self.samples + 1,), "spans": (spans, 2)}

    def __str__(self) -> str:
        return self.in_words()

    def in_words(self, *, pairs: bool = False) -> str:
        """`pairs`: two samples are one."""
        things, each, cut = ("pairs", 2, "texts truncated") if pairs else ("samples", 1, "truncated")
        return (
            f"{self.samples // each} {things} of {self.records // each} records, {self.tokens} tokens, "
            f"{self.target_tokens} of them learned; {self.truncated} {cut}, "
            f"{self.dropped_too_long // each} dropped as too long, "
            f"{self.dropped_no_target // each} dropped with nothing to learn"
        )


class PreparedSamples(Sequence[dict[str, np.ndarray]]):
    """Samples in a fixed order, for a sampler and a collate function."""

    lengths: np.ndarray  # [samples] int64: tokens of each sample, prompt included
    target_counts: np.ndarray  # [samples] int64: tokens of each that are predicted and learned, so without its first
    largest_token: int  # of all samples; of a subset also of those left out

    @property
    def images(self) -> list[list[int]] | None:
        """Of each sample the entries of pixel_values, by unit of attention in the tower; None: the data set has no
        images.
        """
        return self._of_images("values")

    @property
    def floors(self) -> list[int] | None:
        """Of each sample the tokens up to and including its last image's, 0 without one; None: as `images`."""
        return self._of_images("floors")

    @abstractmethod
    def _of_images(self, name: str) -> list | None: ...

    @abstractmethod
    def _sample(self, index: int) -> dict[str, np.ndarray]: ...

    @abstractmethod
    def undecoded(self) -> PreparedSamples:
        """The same for `find_relatives`, quickly and without a processor: "pixel_values" are the encoded bytes of the
        images, and all tokens up to and including the last image's count as theirs.
        """

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """{"input_ids", "labels"}, each [length] int64, copies that the caller may change.

        Of a sample with images also "mm_token_type_ids", [length] int64, 1 for an image's tokens, and what the
        model's processor makes of them, without the dimension of the batch: "pixel_values", and of some
        "image_grid_thw" or "pixel_attention_mask". Raises ValueError if no processor was given.
        """
        index = operator.index(index)
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)} samples")
        return self._sample(index % len(self))


class TokenizedDataset(PreparedSamples):
    """Samples as flat arrays, in memory or mapped from a file.

    tokens    [total] int32         all samples, one after the other
    offsets   [samples + 1] int64   sample i is tokens[offsets[i] : offsets[i + 1]]
    spans     [spans, 2] int64      tokens[start : end] are targets; ascending, each within one sample
    """

    def __init__(
        self,
        tokens: np.ndarray,
        offsets: np.ndarray,
        spans: np.ndarray,
        summary: DataSummary,
        path: str | os.PathLike | None = None,
        shown: ShownImages | None = None,
    ) -> None:
        """`path`: the file that the arrays are mapped from, if any. `shown`: the samples' images, if any."""
        self.tokens, self.offsets, self.spans = tokens, offsets, spans
        self.summary = summary
        self.path = None if path is None else Path(path)
        self.shown = shown

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    @property
    def target_counts(self) -> np.ndarray:
        return self.targets_below(len(self.tokens))

    def targets_below(self, cap: int) -> np.ndarray:
        """[samples] int64: targets among each sample's first `cap` tokens."""
        owner = np.searchsorted(self.offsets, self.spans[:, 0], side="right") - 1
        begin = self.offsets[owner]
        counts = np.zeros(len(self), np.int64)
        within = np.minimum(self.spans[:, 1], begin + cap) - np.maximum(self.spans[:, 0], begin + 1)
        np.add.at(counts, owner, np.maximum(within, 0))
        return counts

    @cached_property
    def largest_token(self) -> int:
        return int(self.tokens.max())

    def _of_images(self, name: str) -> list | None:
        return None if self.shown is None else getattr(self.shown, name)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def _sample(self, index: int) -> dict[str, np.ndarray]:
        sample = self.text(index)
        return sample if self.shown is None else sample | self.shown.fields(index, sample["input_ids"])

    def undecoded(self) -> TokenizedDataset:
        shown = self.shown and ShownImages(self.shown.arrays, None, decoded=False)
        return TokenizedDataset(self.tokens, self.offsets, self.spans, self.summary, shown=shown)

    def text(self, index: int) -> dict[str, np.ndarray]:
        """A sample's "input_ids" and "labels" alone, which need no processor."""
        begin, end = self.offsets[index : index + 2]
        input_ids = self.tokens[begin:end].astype(np.int64)
        labels = np.full_like(input_ids, IGNORED)
        first, last = np.searchsorted(self.spans[:, 0], (begin, end))
        for start, stop in self.spans[first:last] - begin:
            labels[start:stop] = input_ids[start:stop]
        return {"input_ids": input_ids, "labels": labels}

    def __reduce__(self) -> tuple:
        # A DataLoader's worker process maps the file itself, instead of receiving a copy of all samples.
        if self.path is not None:
            processor = self.shown and self.shown.processor
            return partial(TokenizedDataset.load, processor=processor and processor.processor), (self.path,)
        return TokenizedDataset, (self.tokens, self.offsets, self.spans, self.summary, None, self.shown)

    def save(self, path: str | os.PathLike) -> None:
        """Writes an `.npz` file, without pickle, atomically."""
        arrays = {name: getattr(self, name) for name in _COLUMNS} | ({} if self.shown is None else self.shown.arrays)
        save_arrays(path, {name: column_of(array) for name, array in arrays.items()}, asdict(self.summary))

    @classmethod
    def load(cls, path: str | os.PathLike, *, processor: Any = None, verify: bool = False) -> TokenizedDataset:
        """Maps a file of `save` or `tokenize_source`. Raises DataError for any other.

        `processor`: the model's, of transformers, without which samples with images can't be read. `verify` reads the
        whole file once and compares its checksums: use it if the file may be damaged.
        """
        try:
            arrays, meta = map_arrays(path, _COLUMNS, optional=IMAGE_COLUMNS, verify=verify)
            summary = DataSummary(**meta)
            shapes = summary.shapes(len(arrays["spans"]))
            own = {name: arrays.pop(name) for name in IMAGE_COLUMNS if name in arrays}
            shown = ShownImages(own, processor and VisionProcessor(processor)) if own else None
            if shown is not None:
                shown.check(summary.samples)
            for name, values in arrays.items():
                if (values.dtype, values.shape) != (_COLUMNS[name], shapes[name]):
                    raise ValueError(f"{name} has {values.shape} {values.dtype}, not {shapes[name]}")
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
        except Exception as error:  # readers of zip, npy and JSON raise many kinds
            raise DataError(f"{path} is not a prepared data set ({error}); prepare it again") from error
        return cls(**arrays, summary=summary, path=path, shown=shown)


def tokenize_source(
    source: RecordSource,
    encoder: TextEncoder,
    path: str | os.PathLike,
    options: DataOptions | None = None,
    progress: Callable[[int], None] | None = None,
) -> DataSummary:
    """Writes the samples of `source`, in its order, for `TokenizedDataset.load`, atomically.

    `progress` is called after each batch with the records done.
    Raises DataError for unusable records, for too long a sample if the options require it, and if none is left; OSError
    if the file can't be written.
    """
    options, summary, spans_written = options or DataOptions(), DataSummary(), 0
    folder = Path(path).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            # Columns grow in unnamed files, which vanish with the process.
            def new_file() -> Any:
                return stack.enter_context(TemporaryFile(dir=folder))

            files = {name: new_file() for name in _COLUMNS}
            shown = ShownWriter(new_file) if encoder.images is not None else None

            def write(column: str, values: Any) -> None:
                files[column].write(np.asarray(values, _COLUMNS[column]).tobytes())

            def encoded() -> Iterator[tuple[Record, Encoded]]:
                for batch in batches(source):
                    yield from zip(batch, encode_records(batch, encoder, options.max_tokens), strict=True)
                    if progress is not None:
                        progress(summary.records)

            write("offsets", 0)
            for sample in samples_of(encoded(), options, summary):
                write("spans", np.asarray(sample.spans) + (summary.tokens - len(sample.ids)))
                write("tokens", sample.ids)
                write("offsets", summary.tokens)
                spans_written += len(sample.spans)
                if shown is not None:
                    shown.add(sample.images, sample.floor)
            require_samples(source.name, summary, options)
            shapes = summary.shapes(spans_written)
            columns = {name: (file, _COLUMNS[name], shapes[name]) for name, file in files.items()}
            columns |= {} if shown is None else shown.columns()
            save_arrays(path, columns, asdict(summary))
    except OSError as error:  # no space, no permission; reading raises DataError instead
        raise OSError(error.errno, f"{error.strerror or error} while the samples were written", str(path)) from error
    return summary


def samples_of(
    encoded: Iterable[tuple[Record, Encoded]], options: DataOptions, summary: DataSummary
) -> Iterator[Encoded]:
    """The samples of these records, encoded by `encode_records`.

    None is cut before the end of its last image: it is dropped, as too long, instead. Counts in `summary`. Raises
    DataError for too long a sample if the options require it.
    """
    records = iter(encoded)
    for given in zip(records, records, strict=True) if options.pairs else ((each,) for each in records):
        fits = sum(len(sample.ids) for _, sample in given) <= options.max_tokens
        most = options.max_tokens if fits else options.max_tokens // len(given)
        group: list[Any] = [_sample_of(*each, options, most) for each in given]
        if options.pairs and given[0][1].ids[:most] == given[1][1].ids[:most]:
            group = ["no target", "no target"]
        summary.records += len(group)
        dropped = [each for each in group if isinstance(each, str)]
        if "too long" in dropped:
            summary.dropped_too_long += len(group)
        elif dropped:
            summary.dropped_no_target += len(group)
        else:
            for sample, targets, is_cut in group:
                summary.samples += 1
                summary.truncated += is_cut
                summary.target_tokens += targets
                summary.tokens += len(sample.ids)
                yield sample


def _sample_of(
    record: Record, sample: Encoded, options: DataOptions, most: int
) -> tuple[Encoded, int, bool] | Literal["too long", "no target"]:
    """(a record's sample of at most `most` tokens, its targets, whether it was cut), or why it has none."""
    ids, spans = sample.ids, sample.spans
    too_long = len(ids) > most
    if too_long:
        if options.too_long == "error":
            characters = record.characters - IMAGE_CHARACTERS * len(record.images)
            least = "at least " if characters > CHARACTERS_PER_TOKEN * options.max_tokens else ""
            half = f", half of that of a pair, {options.max_tokens}" * options.pairs
            raise DataError(
                f"{record.where}: {least}{len(ids)} tokens, more than the cap of {most}{half}; raise --token-cap, or "
                f"give --truncate or --drop-long"
            )
        if options.too_long == "drop" or sample.floor > most:
            return "too long"
        ids = ids[:most]
        spans = [(start, min(end, len(ids))) for start, end in spans if start < len(ids)]
    targets = sum(max(end - max(start, 1), 0) for start, end in spans)
    return (sample._replace(ids=ids, spans=spans), targets, too_long) if targets else "no target"


def require_samples(name: str, summary: DataSummary, options: DataOptions) -> None:
    """Raises DataError if the whole source `name` has no sample."""
    if summary.samples:
        return
    remedy = "; is there a completion, or a turn whose role is 'assistant', and does it begin below the cap?"
    if summary.dropped_too_long > summary.dropped_no_target:
        cut = "images can't be cut" if options.too_long == "truncate" else "or give --truncate"
        remedy = f"; raise --token-cap, {cut}"
    found = summary.in_words(pairs=options.pairs)
    raise DataError(f"{name} leaves no sample to train on: {found}; the cap is {options.max_tokens} tokens{remedy}")


class SampleSubset(PreparedSamples):
    """Samples of one or several data sets, without a copy of their tokens; one may be there several times."""

    def __init__(self, sets: Sequence[PreparedSamples], indices: np.ndarray) -> None:
        """`indices`: [samples] int64, of the samples of all `sets`, one set after the other."""
        self.sets, self.indices = sets, indices
        self._begins = np.cumsum([0, *map(len, sets)])

    @property
    def lengths(self) -> np.ndarray:
        return np.concatenate([each.lengths for each in self.sets])[self.indices]

    @property
    def target_counts(self) -> np.ndarray:
        return np.concatenate([each.target_counts for each in self.sets])[self.indices]

    @property
    def largest_token(self) -> int:
        return max(each.largest_token for each in self.sets)

    def _of_images(self, name: str) -> list | None:
        values = [each._of_images(name) for each in self.sets]
        if all(each is None for each in values):
            return None
        without = {"values": [], "floors": 0}[name]
        whole = [([without] * len(each) if own is None else own) for each, own in zip(self.sets, values, strict=True)]
        joined = [*chain.from_iterable(whole)]
        return [joined[index] for index in self.indices]

    def __len__(self) -> int:
        return len(self.indices)

    def _sample(self, index: int) -> dict[str, np.ndarray]:
        number = int(self.indices[index])
        which = int(np.searchsorted(self._begins, number, side="right")) - 1
        return self.sets[which][number - int(self._begins[which])]

    def undecoded(self) -> SampleSubset:
        return SampleSubset([each.undecoded() for each in self.sets], self.indices)


def mixture(sets: Sequence[PreparedSamples], copies: Sequence[int] | None = None) -> SampleSubset:
    """Several data sets as one, in order; of each its copies, one after the other, as `order.Mix` numbers them."""
    begins = np.cumsum([0, *map(len, sets)])
    numbers = [np.arange(*bounds) for bounds in pairwise(begins.tolist())]
    copies = [1] * len(sets) if copies is None else copies
    return SampleSubset(sets, np.concatenate([np.tile(own, n) for own, n in zip(numbers, copies, strict=True)]))


def split_samples(
    data: TokenizedDataset, evaluation: float, *, seed: int = 0, pairs: bool = False
) -> tuple[SampleSubset, SampleSubset]:
    """(to train on, to evaluate on): disjoint, together all samples. `pairs`: of samples 2i and 2i + 1.

    `evaluation` is a number of samples, 1 or more, or a fraction below 1 (rounded, at least one sample). Raises
    ValueError if a part would be empty.
    """
    each = 1 + pairs
    total = len(data) // each
    if not evaluation > 0 or (evaluation >= 1 and evaluation != int(evaluation)):
        raise ValueError(
            f"the evaluation split is {evaluation!r}; give a number of samples, 1 or more, or a fraction below 1"
        )
    count = int(evaluation) if evaluation >= 1 else max(round(evaluation * total), 1)
    if count >= total:
        raise ValueError(
            f"an evaluation split of {evaluation!r} would take {count} of {total} samples and leave none to train "
            "on; make it smaller, or give more data"
        )
    # Only Random.random is stable across Python versions; numpy's generators are not.
    generator = random.Random(f"evaluation {seed}")
    keys = np.fromiter((generator.random() for _ in range(total)), np.float64, total)
    aside = np.zeros(total, bool)
    aside[np.argsort(keys, kind="stable")[:count]] = True
    aside = aside.repeat(each)
    return SampleSubset([data], np.flatnonzero(~aside)), SampleSubset([data], np.flatnonzero(aside))
