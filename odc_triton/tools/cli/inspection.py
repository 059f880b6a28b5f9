"""Statistics of data files before training: `odc-triton data inspect`."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from ...checkpoint.adapted import read_config
from ...jobs.data.dataset import DataOptions, DataSummary, TokenizedDataset, tokenize_source
from ...jobs.data.encode import encode_records, never_ends
from ...jobs.data.sources import RecordSource, open_source
from ...jobs.data.templates import with_template
from ...jobs.data.tokenizer import TextEncoder, read_tokenizer
from ...jobs.data.vision import has_processor, read_processor
from ...jobs.options.options import columns_of
from ...plan.cost import CostModel
from ...plan.fields import IGNORED
from ...plan.order import Mix
from ...plan.relatives import find_relatives

_NO_CAP = 2**31 - 1
_INSPECTED = 16  # records, for the warning
_NAMED = {0: "shortest", 50: "median", 100: "longest"}
_PERCENTILES = {part: _NAMED.get(part, f"{part}%") for part in (0, 5, 25, 50, 75, 90, 95, 99, 100)}
_SHOWN = 240  # characters of one part of the example, at most


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """Statistics of a source. Lengths and tokens are counted before truncation."""

    data: str
    forms: Counter[str]  # records of each form
    summary: DataSummary
    lengths: np.ndarray  # tokens of each sample
    images: np.ndarray  # of each record
    token_cap: int
    too_long_nothing_left: int  # samples over the cap that truncation leaves nothing to learn of
    largest_token: int
    vocabulary: int | None  # token ids that the model has
    tokens_outside: int  # that it lacks
    shared: tuple[int, float]  # tokens that sharing prefixes saves, and their share of the time
    warning: str | None  # for a training run on these data
    example: list[tuple[bool, str]]  # one sample of middle length: (is learned, its text), in turn

    def __str__(self) -> str:
        """A page, safe to print: control characters in the data are escaped."""
        summary, cap = self.summary, self.token_cap
        forms = ", ".join(f"{count:,} of {form}" for form, count in self.forms.items())
        lines = [
            f"{self.data}: {summary.records:,} records ({forms})",
            f"{summary.samples:,} samples, {summary.tokens:,} tokens, {summary.target_tokens:,} of them learned "
            f"({summary.target_tokens / summary.tokens:.0%})",
        ]
        if self.warning is not None:
            lines.append(f"warning: {self.warning}")
        if summary.dropped_no_target:
            lines.append(f"{summary.dropped_no_target:,} records have nothing to learn and would be dropped")
        if self.images.any():
            least, median, most = np.percentile(self.images, (0, 50, 100))
            lines.append(
                f"{self.images.sum():,} images; a record has {least:.0f} to {most:.0f}, {self.images.mean():.2g} "
                f"in the mean, {median:.0f} in the median"
            )
        lines += ["", "length in tokens"]
        values = np.percentile(self.lengths, [*_PERCENTILES])
        for name, value in [*zip(_PERCENTILES.values(), values, strict=True), ("mean", self.lengths.mean())]:
            lines.append(f"  {name:>8}  {value:>10,.0f}")
        over = self.lengths[self.lengths > cap]
        lines += ["", f"no sample is longer than the cap of {cap:,} tokens"]
        if len(over):
            lines[-1] = (
                f"{len(over):,} samples ({len(over) / summary.samples:.1%}) are longer than the cap of {cap:,} tokens: "
                f"truncating cuts off {(over - cap).sum():,} tokens and leaves {self.too_long_nothing_left:,} of them "
                f"with nothing to learn; dropping removes all of them"
            )
        tokens, time = self.shared
        share = tokens / np.minimum(self.lengths, cap).sum()
        lines.append(
            f"{tokens:,} tokens ({share:.1%}) are not learned and begin another sample too, 32 or more in a row: "
            f"train sft --share-prefixes saves these at most, {time:.1%} of the time"
        )
        if self.tokens_outside:
            lines.append(
                f"{self.tokens_outside:,} tokens are outside the model's vocabulary of {self.vocabulary:,} (the "
                f"largest is {self.largest_token:,}): give the model's own tokenizer"
            )
        text = "".join(f"«{_safe(part)}»" if learned else _safe(part) for learned, part in self.example)
        return "\n".join([*lines, "", "one sample; «…» is learned:", text])


def inspect_data(
    source: RecordSource, encoder: TextEncoder, *, token_cap: int, cost: CostModel, vocabulary: int | None = None
) -> Inspection:
    """Statistics of `source`. Memory does not grow with it, but for a few bytes per sample. Raises as
    `tokenize_source` does.
    """
    DataOptions(max_tokens=token_cap)  # raises if the cap is too small
    forms, images = Counter(), []
    for record in source:
        forms[record.form] += 1
        images.append(len(record.images))
    first = list(islice(source, _INSPECTED))
    with TemporaryDirectory(prefix="odc-triton-inspect-") as folder:
        path = Path(folder) / "data.npz"
        tokenize_source(source, encoder, path, DataOptions(max_tokens=_NO_CAP))
        data = TokenizedDataset.load(path, processor=encoder.images and encoder.images.processor)
    return Inspection(
        data=source.name,
        forms=forms,
        summary=data.summary,
        lengths=data.lengths,
        images=np.array(images),
        token_cap=token_cap,
        too_long_nothing_left=int(((data.lengths > token_cap) & (data.targets_below(token_cap) == 0)).sum()),
        largest_token=data.largest_token,
        vocabulary=vocabulary,
        tokens_outside=0 if vocabulary is None else _count_from(data.tokens, vocabulary),
        shared=find_relatives(data.undecoded()).savings(cost, token_cap=token_cap),
        warning=never_ends(first, list(encode_records(first, encoder, _NO_CAP)), encoder, _NO_CAP),
        example=_example(data, encoder),
    )


def main(options: argparse.Namespace) -> int:
    """Prints the statistics; returns 1 if `options.model` lacks tokens. With several files also each one's share of an
    epoch.
    """
    names, weights = options.files, options.data_weight
    columns = columns_of(options.map)
    Mix((10**9,) * len(names), tuple(weights))  # raises before files are read
    reader = with_template(_reader(options.tokenizer, names, columns), options.chat_template)
    encoder = TextEncoder.of(reader, fetch=options.fetch_images)
    config = None if options.model is None else read_config(options.model).get_text_config()
    cost = CostModel.paper_7b() if config is None else CostModel.from_config(config)
    how = {"token_cap": options.token_cap, "vocabulary": config and config.vocab_size, "cost": cost}
    found = [inspect_data(open_source(name, columns), encoder, **how) for name in names]
    pages = [*map(str, found), *([_epoch(found, weights)] if len(names) > 1 or weights else [])]
    print("\n\n\n".join(pages))
    return int(any(each.tokens_outside for each in found))


def _reader(tokenizer: str, names: Sequence[str], columns: Mapping[str, str]) -> Any:
    """The tokenizer, or, for data with images, the processor in the same folder."""
    may_have_one = has_processor(tokenizer) or not Path(tokenizer).exists()  # a hub id
    if may_have_one and any(record.images for name in names for record in open_source(name, columns)):
        return read_processor(tokenizer)
    return read_tokenizer(tokenizer)


def _epoch(files: Sequence[Inspection], weights: Sequence[float]) -> str:
    """Each file's samples, and tokens on average, of an epoch. Raises ValueError as `Mix` does."""
    mix = Mix(tuple(found.summary.samples for found in files), tuple(weights))
    tokens = [n * found.lengths.mean() for n, found in zip(mix.taken, files, strict=True)]
    lines = ["an epoch takes"]
    for found, weight, taken, own in zip(files, mix.weights, mix.taken, tokens, strict=True):
        lines.append(
            f"  {taken:>9,} samples ({taken / len(mix):.1%}), {own:>11,.0f} tokens ({own / sum(tokens):.1%})  of "
            f"{found.data}, weight {weight:g}"
        )
    return "\n".join(lines)


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


def _safe(text: str) -> str:
    """Short enough, with control characters escaped."""
    if len(text) > _SHOWN:
        text = f"{text[: _SHOWN // 2]} […] {text[-_SHOWN // 2 :]}"
    return "".join(at if at == "\n" or at.isprintable() else ascii(at)[1:-1] for at in text)
