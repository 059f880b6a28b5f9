"""Samples: the records of a file as one compact array of tokens, with what is learned marked.

Labels follow the convention of transformers: equal to `input_ids` where a token is a target, -100 elsewhere,
not shifted. All tokens of a text are targets; of a prompt and its completion, the completion's and the end
token. The first token of a sample, which nothing comes before, is never predicted: it is not counted as a
target, and a sample without another one is dropped.
"""

from __future__ import annotations

import json
import operator
import os
from array import array
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields
from itertools import islice
from typing import Literal, get_args

import numpy as np

from odc_triton.train.atomic import atomic_file
from odc_triton.train.records import DataError, Record, read_records
from odc_triton.train.tokenizer import TextEncoder

IGNORED_LABEL = -100
TooLong = Literal["error", "truncate", "drop"]


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """How records become samples."""

    max_tokens: int = field(default=2048, metadata={"help": "longest sample, in tokens, prompt and end token included"})
    too_long: TooLong = field(
        default="truncate",
        metadata={
            "help": "what to do with a sample longer than max_tokens: stop with an error, cut its end off, "
            "or leave it out; the summary counts the last two"
        },
    )
    batch_records: int = field(
        default=1024,
        metadata={"help": "records given to the tokenizer at a time; changes speed and memory only"},
    )

    def __post_init__(self) -> None:
        # A sample needs a token to predict and one to predict it from.
        if self.max_tokens < 2:
            raise ValueError(f"max_tokens is {self.max_tokens}; it must be at least 2 tokens")
        if self.too_long not in get_args(TooLong):
            raise ValueError(f"too_long is {self.too_long!r}; it must be one of {', '.join(get_args(TooLong))}")
        if self.batch_records < 1:
            raise ValueError(f"batch_records is {self.batch_records}; it must be at least 1")


@dataclass(frozen=True, kw_only=True)
class DataSummary:
    """Counts of one preparation, in samples unless named otherwise."""

    records: int
    samples: int
    truncated: int  # samples kept, their end cut off
    dropped_too_long: int
    dropped_no_target: int  # nothing to learn: an empty text, or a prompt that fills max_tokens
    tokens: int
    target_tokens: int

    def __str__(self) -> str:
        return (
            f"{self.samples} samples of {self.records} records, {self.tokens} tokens, "
            f"{self.target_tokens} of them learned; {self.truncated} truncated, "
            f"{self.dropped_too_long} dropped as too long, "
            f"{self.dropped_no_target} dropped with nothing to learn"
        )


class TokenizedDataset:
    """Samples as one flat array: what a sampler and a collate function read.

    tokens          [total] int32      all samples, one after the other
    offsets         [samples + 1] int64   sample i is tokens[offsets[i] : offsets[i + 1]]
    prompt_lengths  [samples] int32    leading tokens of each sample that are not targets
    """

    def __init__(
        self, tokens: np.ndarray, offsets: np.ndarray, prompt_lengths: np.ndarray, summary: DataSummary
    ) -> None:
        self.tokens, self.offsets, self.prompt_lengths = tokens, offsets, prompt_lengths
        self.summary = summary

    @property
    def lengths(self) -> np.ndarray:
        """[samples] int64: tokens of each sample, prompt included."""
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """{"input_ids", "labels"}, each [length] int64 and the caller's own to change."""
        index = operator.index(index)
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of a data set of {len(self)}")
        index %= len(self)
        input_ids = self.tokens[self.offsets[index] : self.offsets[index + 1]].astype(np.int64)
        labels = input_ids.copy()
        labels[: self.prompt_lengths[index]] = IGNORED_LABEL
        return {"input_ids": input_ids, "labels": labels}

    def save(self, path: str | os.PathLike) -> None:
        """Writes an `.npz` file, without pickle, atomically."""
        with atomic_file(path) as file:
            np.savez(
                file,
                tokens=self.tokens,
                offsets=self.offsets,
                prompt_lengths=self.prompt_lengths,
                summary=np.array(json.dumps(asdict(self.summary))),
            )

    @classmethod
    def load(cls, path: str | os.PathLike) -> TokenizedDataset:
        """Reads what `save` wrote. Raises DataError for anything else."""
        try:
            # Opened here, because np.load leaves a file open that turns out not to be a zip archive.
            with open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
                tokens, offsets, prompt_lengths = (arrays[name] for name in ("tokens", "offsets", "prompt_lengths"))
                summary = DataSummary(**json.loads(str(arrays["summary"])))
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
        except Exception as error:  # the readers of zip, npy and JSON raise a dozen kinds
            raise DataError(f"{path} is not a prepared data set ({error}); prepare it again") from error
        _check_arrays(path, tokens, offsets, prompt_lengths)
        return cls(tokens, offsets, prompt_lengths, summary)


def tokenize_file(
    path: str | os.PathLike,
    encoder: TextEncoder,
    options: DataOptions | None = None,
    progress: Callable[[int, float], None] | None = None,
) -> TokenizedDataset:
    """The samples of a JSON-lines file, in its order.

    `progress` is called after each batch with the records done and their fraction of the file's bytes.
    Raises DataError for unusable records, for a sample too long if the options say so, and if none is left.
    """
    options = options or DataOptions()
    tokens, offsets, prompt_lengths = array("i"), array("q", [0]), array("i")
    counts = dict.fromkeys((f.name for f in fields(DataSummary)), 0)
    records = read_records(path)
    while batch := list(islice(records, options.batch_records)):
        for record, (ids, prompt_tokens) in zip(batch, _encode(batch, encoder), strict=True):
            counts["records"] += 1
            too_long = len(ids) > options.max_tokens
            if too_long:
                if options.too_long == "error":
                    raise DataError(
                        f"{path}, line {record.line}: {len(ids)} tokens, more than max_tokens = "
                        f"{options.max_tokens}; raise max_tokens, or set too_long to truncate or drop"
                    )
                if options.too_long == "drop":
                    counts["dropped_too_long"] += 1
                    continue
                ids = ids[: options.max_tokens]
            targets = len(ids) - max(prompt_tokens, 1)
            if targets < 1:
                counts["dropped_no_target"] += 1
                continue
            counts["truncated"] += too_long
            counts["target_tokens"] += targets
            tokens.extend(ids)
            offsets.append(len(tokens))
            prompt_lengths.append(prompt_tokens)
        if progress is not None:
            progress(counts["records"], batch[-1].end_byte / max(os.path.getsize(path), 1))
    counts["samples"], counts["tokens"] = len(prompt_lengths), len(tokens)
    summary = DataSummary(**counts)
    if not summary.samples:
        raise DataError(f"{path} leaves no sample to train on: {summary}; max_tokens = {options.max_tokens}")
    return TokenizedDataset(
        np.frombuffer(tokens, np.int32),
        np.frombuffer(offsets, np.int64),
        np.frombuffer(prompt_lengths, np.int32),
        summary,
    )


def _encode(batch: list[Record], encoder: TextEncoder) -> Iterator[tuple[list[int], int]]:
    """(ids, leading ids that are not targets) of each record."""
    texts = [text for record in batch for text in (record.prompt, record.completion) if text is not None]
    encoded = iter(encoder.encode_batch(texts))
    for record in batch:
        if record.prompt is None:
            head, masked = [*encoder.before_text], 0
        else:
            head = [*encoder.before_prompt, *next(encoded), *encoder.before_completion]
            masked = len(head)
        completion = next(encoded)
        ids = [*head, *completion]
        # A text made by a chat template may carry its end token already.
        if not len(completion) or completion[-1] != encoder.end_id:
            ids.append(encoder.end_id)
        yield ids, masked


def _check_arrays(path: str | os.PathLike, tokens: np.ndarray, offsets: np.ndarray, prompt_lengths: np.ndarray) -> None:
    for name, values, dtype in (
        ("tokens", tokens, np.int32),
        ("offsets", offsets, np.int64),
        ("prompt_lengths", prompt_lengths, np.int32),
    ):
        if values.dtype != dtype or values.ndim != 1:
            raise DataError(
                f"{path} is not a prepared data set ({name} is {values.ndim}-d {values.dtype}, not 1-d "
                f"{np.dtype(dtype)}); prepare it again"
            )
    fits = len(offsets) == len(prompt_lengths) + 1 and offsets[0] == 0 and offsets[-1] == len(tokens)
    if not fits or np.any(prompt_lengths < 0) or np.any(prompt_lengths >= np.diff(offsets)):
        raise DataError(f"{path} is not a prepared data set (its arrays do not fit together); prepare it again")
