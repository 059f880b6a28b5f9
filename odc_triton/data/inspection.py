"""Statistics of a data file before training: `odc-triton data inspect`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import islice, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from .chat import ASSISTANT, Conversation, Spans, joined_spans
from .dataset import DataOptions, TokenizedDataset, tokenize_source
from .encode import Encoded, encode_records
from .order import Mix
from .records import IGNORED, Record, message_text
from .sources import RecordSource, open_source
from .tokenizer import TextEncoder, read_config, read_tokenizer
from .vision import has_processor, read_processor

_NO_CAP = 2**31 - 1
_INSPECTED = 16  # records, for the warning
_PERCENTILES = (0, 5, 25, 50, 75, 90, 95, 99, 100)
_BAR = 40  # characters
_SHOWN = 240  # characters of one part of the example, at most

# (tokens that sharing prefixes saves, their share of the time) of samples cut off at a cap; balance/relatives.py has it
Savings = Callable[[TokenizedDataset, int], tuple[int, float]]


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """Statistics of a data file. Lengths and tokens are counted before truncation."""

    data: str
    unit: str  # of lengths: tokens, or bytes without a tokenizer
    records: int
    forms: dict[str, int]  # records of each form
    samples: int  # records with something to learn, at any length
    nothing_to_learn: int
    tokens: int
    target_tokens: int
    lengths: dict[str, float]  # percentiles by their number, and the mean
    histogram: list[tuple[int, int, int]]  # (shortest, longest, samples) of each bin
    token_cap: int
    too_long: int  # samples over the cap: "truncate" cuts them, "drop" leaves them out, "error" stops
    tokens_over_cap: int  # that truncation cuts off
    too_long_nothing_left: int  # of them, those that truncation leaves nothing to learn of
    largest_token: int
    vocabulary: int | None  # token ids that the model has
    tokens_outside: int | None  # tokens that it lacks
    pictures: dict[str, float] | None  # percentiles by record, the mean, and "all"; None without any
    shared_tokens: int | None  # within the cap, that begin a sample as others; most that --share-prefixes saves
    shared_time: float | None  # their share of the time by the cost model
    warning: str | None  # for a training run on these data
    example: list[tuple[bool, str]]  # one sample of middle length: (is learned, its text), in turn


def inspect_data(
    source: RecordSource,
    encoder: TextEncoder,
    *,
    token_cap: int,
    vocabulary: int | None = None,
    unit: str = "tokens",
    savings: Savings | None = None,
) -> Inspection:
    """Statistics of `source`. Raises as `tokenize_source` does.

    Memory does not grow with it, but for a few bytes per sample. `savings`: of its samples; None: not counted.
    """
    DataOptions(max_tokens=token_cap)  # raises if the cap is too small
    forms, counts = Counter(), []
    for record in source:
        forms[record.form] += 1
        counts.append(len(record.pictures))
    pictures = np.array(counts)
    with TemporaryDirectory(prefix="odc-triton-inspect-") as folder:
        path = Path(folder) / "data.npz"
        summary = tokenize_source(source, encoder, path, DataOptions(max_tokens=_NO_CAP))
        data = TokenizedDataset.load(path, processor=encoder.pictures and encoder.pictures.processor)
    lengths = data.lengths
    over = lengths > token_cap
    shared_tokens, shared_time = (None, None) if savings is None else savings(data, token_cap)
    return Inspection(
        data=source.name,
        unit=unit,
        records=summary.records,
        forms=dict(forms),
        samples=summary.samples,
        nothing_to_learn=summary.dropped_no_target,
        tokens=summary.tokens,
        target_tokens=summary.target_tokens,
        lengths=_spread(lengths),
        pictures=_spread(pictures) | {"all": float(pictures.sum())} if pictures.any() else None,
        histogram=_histogram(lengths),
        token_cap=token_cap,
        too_long=int(over.sum()),
        tokens_over_cap=int((lengths[over] - token_cap).sum()),
        too_long_nothing_left=int((over & (data.targets_below(token_cap) == 0)).sum()),
        largest_token=data.largest_token,
        vocabulary=vocabulary,
        tokens_outside=None if vocabulary is None else _count_from(data.tokens, vocabulary),
        example=_example(data, encoder),
        shared_tokens=shared_tokens,
        shared_time=shared_time,
        warning=_warning(source, encoder) if unit == "tokens" else None,
    )


def never_ends(
    batch: Sequence[Record], encoded: Sequence[Encoded], encoder: TextEncoder, max_tokens: int
) -> str | None:
    """A warning if conversations are learned and none of their turns ends with the end token.

    `encoded`: `batch` as encoded by `encode_records`; samples longer than `max_tokens` may lack their end.
    """
    learned = [
        sample.ids[start:end]
        for record, sample in zip(batch, encoded, strict=True)
        for start, end in sample.spans
        if record.messages is not None and len(sample.ids) <= max_tokens
    ]
    if not learned or any(encoder.end_id in ids for ids in learned):
        return None
    end = encoder.end_id if encoder.decode is None else encoder.decode([encoder.end_id])
    return (
        f"the chat template ends no turn of the assistant with the tokenizer's end token, {end}: the trained model "
        f"will not stop there. Make the token that ends a turn the eos_token, or stop at it when you generate"
    )


def _warning(source: RecordSource, encoder: TextEncoder) -> str | None:
    records = list(islice(source, _INSPECTED))
    return never_ends(records, list(encode_records(records, encoder, _NO_CAP)), encoder, _NO_CAP)


def main(
    names: Sequence[str],
    *,
    weights: Sequence[float] = (),
    tokenizer: str | None,
    model: str | None,
    token_cap: int,
    fetch_images: bool = False,
    as_json: bool,
    savings: Savings | None = None,
) -> tuple[str, bool]:
    """(the command's output, True if the model has all tokens). With several names also each one's share of an epoch
    by `weights`. `savings`: see `inspect_data`."""
    if token_cap < 2:
        raise ValueError(f"--token-cap is {token_cap}; give at least 2: one token to predict and one before it")
    encoder = _bytes() if tokenizer is None else TextEncoder.of(_reader(tokenizer, names), fetch=fetch_images)
    vocabulary = None if model is None else read_config(model).get_text_config().vocab_size
    unit = "bytes" if tokenizer is None else "tokens"
    how = {"token_cap": token_cap, "vocabulary": vocabulary, "unit": unit, "savings": savings}
    all_found = [inspect_data(open_source(name), encoder, **how) for name in names]
    fits = not any(found.tokens_outside for found in all_found)
    if len(names) == 1 and not weights:
        (found,) = all_found
        return json.dumps(asdict(found), indent=2) if as_json else describe(found), fits
    parts = shares(all_found, weights)
    if as_json:
        return json.dumps({"files": [asdict(each) for each in all_found], "epoch": parts}, indent=2), fits
    return "\n\n\n".join([*map(describe, all_found), _epoch(parts, unit)]), fits


def _reader(tokenizer: str, names: Sequence[str]) -> Any:
    """The tokenizer, or, for data with pictures, the processor beside it."""
    may_have_one = has_processor(tokenizer) or not Path(tokenizer).exists()  # a hub id
    if may_have_one and any(record.pictures for name in names for record in open_source(name)):
        return read_processor(tokenizer)
    return read_tokenizer(tokenizer)


def shares(files: Sequence[Inspection], weights: Sequence[float]) -> list[dict[str, Any]]:
    """Each file's part of an epoch: its weight, samples, tokens on average, and their shares of the epoch's.

    Raises ValueError as `Mix` does.
    """
    mix = Mix(tuple(found.samples for found in files), tuple(weights))
    tokens = [taken * found.tokens / found.samples for taken, found in zip(mix.taken, files, strict=True)]
    return [
        {
            "data": found.data,
            "weight": weight,
            "samples": taken,
            "tokens": round(own),
            "share_of_samples": taken / len(mix),
            "share_of_tokens": own / sum(tokens),
        }
        for found, weight, taken, own in zip(files, mix.weights, mix.taken, tokens, strict=True)
    ]


def _epoch(parts: Sequence[dict[str, Any]], unit: str) -> str:
    lines = ["an epoch takes"]
    for each in parts:
        lines.append(
            f"  {each['samples']:>9,} samples ({each['share_of_samples']:.1%}), {each['tokens']:>11,} {unit} "
            f"({each['share_of_tokens']:.1%})  of {each['data']}, weight {each['weight']:g}"
        )
    return "\n".join(lines)


def describe(found: Inspection) -> str:
    """The findings as a page of text, safe to print: control characters in the data are escaped."""
    unit, cap = found.unit, found.token_cap
    forms = ", ".join(f"{count:,} of {form}" for form, count in found.forms.items())
    lines = [
        f"{found.data}: {found.records:,} records ({forms})",
        f"{found.samples:,} samples, {found.tokens:,} {unit}, {found.target_tokens:,} of them learned "
        f"({found.target_tokens / found.tokens:.0%})",
    ]
    if unit == "bytes":
        lines.append("lengths are bytes of UTF-8, without the chat template: give --tokenizer to count tokens")
    if found.warning is not None:
        lines.append(f"warning: {found.warning}")
    if found.nothing_to_learn:
        lines.append(f"{found.nothing_to_learn:,} records have nothing to learn and would be dropped")
    if (spread := found.pictures) is not None:
        lines.append(
            f"{spread['all']:,.0f} pictures; a record has {spread['0']:.0f} to {spread['100']:.0f}, "
            f"{spread['mean']:.2g} in the mean, {spread['50']:.0f} in the median, {spread['95']:.0f} at 95%"
        )
    lines += ["", f"length in {unit}"]
    names = {"0": "shortest", "50": "median", "100": "longest", "mean": "mean"}
    lines += [f"  {names.get(at, at + '%'):>8}  {value:>10,.0f}" for at, value in found.lengths.items()]
    lines.append("")
    most = max(count for *_, count in found.histogram)
    for shortest, longest, count in found.histogram:
        mark = "  over the cap" if shortest > cap else ""
        bar = "#" * (-(-count * _BAR // most))
        lines.append(f"  {shortest:>9,} to {longest:>9,}  {count:>9,}  {bar:<{_BAR}}{mark}".rstrip())
    lines += ["", _over(found)]
    if found.shared_tokens is not None:
        lines.append(_shared(found))
    if found.tokens_outside:
        lines.append(
            f"{found.tokens_outside:,} tokens are outside the model's vocabulary of {found.vocabulary:,} (the "
            f"largest is {found.largest_token:,}): give the model's own tokenizer"
        )
    elif found.vocabulary is not None:
        lines.append(f"all token ids are within the model's vocabulary of {found.vocabulary:,}")
    text = "".join(f"«{_safe(part)}»" if learned else _safe(part) for learned, part in found.example)
    return "\n".join([*lines, "", "one sample; «…» is learned:", text])


class _PlainChat:
    """Conversations without a template: their texts, one after the other."""

    def encode(self, conversations: Sequence[Conversation], max_tokens: int) -> list[tuple[list[int], Spans]]:
        samples = []
        for conversation in conversations:
            ids: list[int] = []
            spans = []
            for number, message in enumerate(conversation.messages):
                begin = len(ids)
                ids += message_text(message).encode()
                if message["role"] == ASSISTANT and number >= conversation.learned_from:
                    spans.append((begin, len(ids)))
            samples.append((ids, joined_spans(spans)))
        return samples


def _bytes() -> TextEncoder:
    return TextEncoder(
        encode_batch=lambda texts: [list(text.encode()) for text in texts],
        end_id=256,
        decode=lambda ids: bytes(at for at in ids if at < 256).decode(errors="replace"),
        chat=_PlainChat(),
    )


def _spread(values: np.ndarray) -> dict[str, float]:
    return {str(at): float(np.percentile(values, at)) for at in _PERCENTILES} | {"mean": float(values.mean())}


def _histogram(lengths: np.ndarray) -> list[tuple[int, int, int]]:
    """Bins of doubling width: lengths of one data set span orders of magnitude."""
    exponents = np.frexp(lengths.astype(np.float64))[1]  # 2**(e - 1) <= length < 2**e
    low, high = int(exponents.min()), int(exponents.max())
    counts = np.bincount(exponents - low, minlength=high - low + 1)
    return [(2 ** (low + at - 1), 2 ** (low + at) - 1, int(count)) for at, count in enumerate(counts)]


def _count_from(tokens: np.ndarray, first: int) -> int:
    step = 1 << 20
    return sum(int((tokens[at : at + step] >= first).sum()) for at in range(0, len(tokens), step))


def _example(data: TokenizedDataset, encoder: TextEncoder) -> list[tuple[bool, str]]:
    if encoder.decode is None:
        return []
    lengths = data.lengths
    middle = int(np.argsort(lengths, kind="stable")[len(lengths) // 2])
    sample = data.text(middle)
    learned = sample["labels"] != IGNORED
    cuts = [0, *(np.flatnonzero(np.diff(learned)) + 1).tolist(), len(learned)]
    return [
        (bool(learned[begin]), encoder.decode(sample["input_ids"][begin:end].tolist())) for begin, end in pairwise(cuts)
    ]


def _over(found: Inspection) -> str:
    if not found.too_long:
        return f"no sample is longer than the cap of {found.token_cap:,} {found.unit}"
    return (
        f"{found.too_long:,} samples ({found.too_long / found.samples:.1%}) are longer than the cap of "
        f"{found.token_cap:,} {found.unit}: truncating cuts off {found.tokens_over_cap:,} {found.unit} and leaves "
        f"{found.too_long_nothing_left:,} of them with nothing to learn; dropping removes all of them"
    )


def _shared(found: Inspection) -> str:
    if not found.shared_tokens:
        return "no two samples begin with enough of the same tokens that are not learned for --share-prefixes"
    share = found.shared_tokens / (found.tokens - found.tokens_over_cap)
    return (
        f"{found.shared_tokens:,} {found.unit} ({share:.1%}) are not learned and begin another sample "
        f"too: train sft --share-prefixes saves these at most, {found.shared_time:.1%} of the time"
    )


def _safe(text: str) -> str:
    """Short enough, with control characters escaped."""
    if len(text) > _SHOWN:
        text = f"{text[: _SHOWN // 2]} […] {text[-_SHOWN // 2 :]}"
    return "".join(at if at == "\n" or at.isprintable() else ascii(at)[1:-1] for at in text)
