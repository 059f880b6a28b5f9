"""Supervised fine-tuning on packed sequences with on-demand communication.

odc-triton train sft --data FILE --model FOLDER --out DIR --ranks 2
torchrun --nproc-per-node 2 -m odc_triton.train.sft --data FILE --model FOLDER --out DIR

Ranks take a while to start, and tokenising a large file takes longer. So `check_before_start` first makes all quick
checks: the model, the data's first records, the folder to write to.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from ..data.dataset import (
    DataOptions,
    DataSummary,
    PreparedSamples,
    SampleSubset,
    TokenizedDataset,
    mixture,
    require_samples,
    samples_of,
    split_samples,
)
from ..data.encode import encode_records, never_ends
from ..data.preferences import PairSource
from ..data.prepared import prepare_data, prepared_path
from ..data.records import DataError
from ..data.sources import RecordSource, open_source
from ..data.store import contents
from ..data.tokenizer import TextEncoder
from . import prepare as preparing
from .job import Among, OnMetrics, Sharded, load_teacher, main_of, run_job, train
from .metrics import Metrics
from .prepare import Prepared, load_any_tokenizer, mix_of, take_folder
from .run_folder import RunFolder
from .sample_options import SampleOptions
from .sft_options import SftOptions
from .sft_run import SftRun
from .vision import load_processor, require_processor

_REPORT_S = 10.0
_RECORDS = 16  # of each source that are checked before the start


def train_sft(options: SftOptions, on_metrics: OnMetrics | None = None) -> Metrics:
    """Trains to the end on this rank. Every rank of the job calls it.

    Rank 0 shows progress and writes into `options.out`: metrics.jsonl, checkpoints, the report, and the trained model
    for plain transformers (or the adapters, for plain PEFT).

    SIGTERM and Ctrl-C ask the run to stop: the ranks agree on it after the next step, save a checkpoint and raise
    Interrupted.

    options: those of the command.
    on_metrics: is called with the metrics after each step, on rank 0.

    Returns the last metrics. Raises MinibatchFailed on all ranks if a microbatch raised on any; RankLost or
    DeadlineExceeded, naming the rank; CheckpointFailed if a checkpoint can't be written; ValueError or OSError for
    unusable input; RuntimeError if more minibatches were skipped than options allow.
    """
    return train(options, prepare, _start, on_metrics)


def train_sft_among(options: SftOptions, among: Among, *, data: Path, on_metrics: OnMetrics) -> Metrics:
    """`train_sft` as one of several runs of a job. `data`: the folder of all runs' prepared data."""
    return train(options, partial(prepare, data=data), _start, on_metrics, among)


def _start(options: SftOptions, sharded: Sharded, prepared: Prepared[PreparedSamples]) -> SftRun:
    teacher = load_teacher(options, sharded)
    model, cost = sharded(options)
    return SftRun(options=options, model=model, teacher=teacher, prepared=prepared, cost=cost)


def check_before_start(options: SampleOptions, ranks: int) -> None:
    """Raises OSError and ValueError for errors that would occur later in the run. Leaves only the folder `out`."""
    sources = [open_source(name, options.columns) for name in options.data]  # first, as it reports missing files
    options.require_replicas(options.replicas or 1, ranks)
    processor, tokenizer = _readers(options)
    encoder = _encoder(options, processor or tokenizer)
    wanted = _wanted(options, ranks // (options.replicas or 1))
    learned = [_begin(source, encoder, wanted, options) for source in sources]
    others = [] if options.eval_data is None else [open_source(options.eval_data, options.columns)]
    held_out = [_begin(source, encoder, wanted, options) for source in others]
    for source, head in zip(sources, learned, strict=True):
        if head.warning is not None:
            print(f"{source.name}: {head.warning}", file=sys.stderr)
    preparing.check_before_start(
        options,
        ranks,
        tokenizer,
        longest=max(head.longest for head in (*learned, *held_out)) + options.more_tokens,
        largest_token=max(head.largest_token for head in (*learned, *held_out)),
    )


@dataclass(frozen=True, kw_only=True)
class _Beginning:
    """Properties of the first records of a source."""

    longest: int
    largest_token: int
    warning: str | None = None


def _begin(source: RecordSource, encoder: TextEncoder, wanted: DataOptions, options: SampleOptions) -> _Beginning:
    """Reads a few records; with images the prepared samples, if there are any, as the images' files may be gone.
    Raises DataError.
    """
    path = encoder.images and prepared_path(source, encoder, wanted, RunFolder(options.out).file("data"))
    if path and path.exists():
        with contextlib.suppress(DataError):  # damaged: prepared again
            made = TokenizedDataset.load(path)
            return _Beginning(longest=int(made.lengths.max()), largest_token=made.largest_token)
    records = list(islice(PairSource(source) if options.pairs else source, _RECORDS))
    if encoder.images is None and not options.pairs:
        require_processor(options, records)
    encoded, summary = list(encode_records(records, encoder, wanted.max_tokens)), DataSummary()
    samples = list(samples_of(zip(records, encoded, strict=True), wanted, summary))
    if len(records) < _RECORDS:  # there are no more
        require_samples(source.name, summary, wanted)
    return _Beginning(
        longest=max((len(each.ids) for each in samples), default=0),
        largest_token=max((max(each.ids, default=0) for each in encoded), default=0),
        warning=never_ends(records, encoded, encoder, wanted.max_tokens),
    )


def prepare(options: SampleOptions, *, mesh: DeviceMesh, data: Path | None = None) -> Prepared[PreparedSamples]:
    """Rank 0 takes the folder, reads and tokenises once; the others load its files. Collective. `data`: the folder of
    prepared data, by default in the run's own.
    """
    world = mesh.size()
    processor, tokenizer = _readers(options)

    def read(folder: RunFolder) -> dict[str, Any]:
        paths = tokenize(options, data or folder.file("data"), mesh.size(mesh.ndim - 1), processor or tokenizer)
        return {"prepared": [contents(path) for path in paths], "paths": [str(path) for path in paths]}

    with take_folder(options, read, mesh=mesh) as (taken, folder):
        sets = [TokenizedDataset.load(Path(path), processor=processor) for path in taken["paths"]]
        largest = max(each.largest_token for each in sets)
        learned, evaluation = sets[: len(options.data)], sets[len(options.data) :]
        if options.eval_fraction:
            how = {"seed": options.seed, "pairs": options.pairs}
            parts = [split_samples(each, options.eval_fraction, **how) for each in learned]
            learned, evaluation = map(list, zip(*parts, strict=True))
            if folder is not None:
                things, each = ("pairs", 2) if options.pairs else ("samples", 1)
                held_out, others = (sum(map(len, sets)) // each for sets in (evaluation, learned))
                print(f"{held_out} {things} are held out, {others} are learned", flush=True)
        mix = mix_of(options, [len(each) // (1 + options.pairs) for each in learned], world)
        data = _joined(learned, mix.copies)
        return Prepared(
            tokenizer=tokenizer,
            data=data,
            evaluation=_joined(evaluation) if evaluation else None,
            mix=mix,
            longest=max(int(each.lengths.max()) for each in (*learned, *evaluation)) + options.more_tokens,
            largest_token=largest,
            identity=taken["identity"],
            folder=folder,
            **taken["before"],
        )


def _joined(sets: list[TokenizedDataset] | list[SampleSubset], copies: Sequence[int] | None = None) -> PreparedSamples:
    return sets[0] if len(sets) == 1 else mixture(sets, copies)


def _wanted(options: SampleOptions, ranks: int) -> DataOptions:
    """Options of the samples, whose segments may be on all `ranks` of a replica."""
    most = options.most_tokens(ranks) - options.more_tokens * (1 + options.pairs)
    return DataOptions(max_tokens=most, too_long=options.too_long, pairs=options.pairs)


def _encoder(options: SampleOptions, reader: Any) -> TextEncoder:
    return TextEncoder.of(reader, fetch=getattr(options, "fetch_images", False))


def _readers(options: SampleOptions) -> tuple[Any | None, Any]:
    """The processor, None for a run of text alone, and the tokenizer."""
    processor = None if options.pairs else load_processor(options)
    return processor, load_any_tokenizer(options) if processor is None else processor.tokenizer


def tokenize(options: SampleOptions, folder: Path, ranks: int, reader: Any = None) -> list[Path]:
    """Prepares the samples in `folder`; returns their files, --eval-data last. `ranks`: of a replica; `reader`: the
    processor or tokenizer, read if it is None.
    """
    if reader is None:
        processor, tokenizer = _readers(options)
        reader = processor or tokenizer
    encoder, wanted = _encoder(options, reader), _wanted(options, ranks)
    paths = []
    for source in (*options.data, options.eval_data):
        if source is not None:
            data = prepare_data(
                source,
                encoder,
                wanted,
                folder=folder,
                columns=options.columns,
                progress=_now_and_then(source, 1 + options.pairs),
            )
            seen = "" if data.images is None else f"; {sum(map(bool, data.images))} of the samples have images"
            print(f"{source}: {data.summary.in_words(pairs=options.pairs)}{seen}", flush=True)
            paths.append(data.path)
    return paths


def _now_and_then(source: str, of_a_row: int) -> Callable[[int], None]:
    """Prints the progress of preparing `source`, every `_REPORT_S` seconds. `of_a_row`: records."""
    reported_s = time.monotonic()

    def report(records: int) -> None:
        nonlocal reported_s
        if time.monotonic() - reported_s >= _REPORT_S:
            reported_s = time.monotonic()
            print(f"{source}: {records // of_a_row} records prepared", flush=True)

    return report


run_sft = partial(run_job, train_sft)
main = partial(main_of, SftOptions, run_sft)
