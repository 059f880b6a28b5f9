"""Prepared data: samples made once, kept in a folder, and found again on the next start.

The file's name holds a hash of everything that the samples depend on: path, size and times of the data (for a data
set of `datasets`, its fingerprint), the tokenizer with its chat template and libraries, `DataOptions`, and the
version of this format. So nothing is ever stale: a change gives another name, and unused files may be deleted at any
time. Checksums are compared before a file is reused; a damaged one is rewritten.

Images are kept in the file as they are encoded; for them its name also holds the processor's settings and Pillow's
version. An image's own file is read only when the samples are made: after a change there, touch the data's file.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

from .dataset import DataOptions, TokenizedDataset, tokenize_source
from .preferences import PairSource
from .records import DataError
from .sources import RecordSource, open_source
from .tokenizer import TextEncoder

# Incremented whenever the same records would give other samples, or the file's layout changes.
FORMAT = 3


def prepared_path(
    source: RecordSource, encoder: TextEncoder, options: DataOptions, folder: str | os.PathLike
) -> Path | None:
    """The file in `folder` of the samples of `source`, made or not; None if source or encoder has no fingerprint."""
    parts = [source.fingerprint(), encoder.fingerprint]
    if None in parts:
        return None
    key = json.dumps([FORMAT, *parts, options.max_tokens, options.too_long, *["pairs"] * options.pairs])
    digest = hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()[:32]
    # The name begins with the source's, for people.
    readable = re.sub(r"[^\w.-]+", "_", Path(source.name).name, flags=re.ASCII)[:60] or "data"
    return Path(folder) / f"{readable}-{digest}.npz"


def prepare_data(
    name: str,
    encoder: TextEncoder,
    options: DataOptions | None = None,
    *,
    folder: str | os.PathLike,
    columns: Mapping[str, str] | None = None,
    progress: Callable[[int], None] | None = None,
) -> TokenizedDataset:
    """The samples of a source (see `sources.open_source`), from `folder` if they were prepared before.

    One rank of a machine calls it; the others `TokenizedDataset.load` the `path` of the result, and share its pages.
    Raises DataError for unusable data, and for data that change while they are read; OSError if `folder` can't be
    written; ValueError if source or encoder has no fingerprint.
    """
    options = options or DataOptions()
    source = open_source(name, columns)
    if options.pairs:
        source = PairSource(source)
    processor = encoder.images and encoder.images.processor
    if (path := prepared_path(source, encoder, options, folder)) is None:
        raise ValueError(f"{name} or its encoder has no fingerprint, so its samples could not be found again")
    if path.exists():
        try:
            return TokenizedDataset.load(path, processor=processor, verify=True)
        except DataError as error:
            warnings.warn(f"the data are prepared again: {error}", RuntimeWarning, stacklevel=2)
    tokenize_source(source, encoder, path, options, progress)
    if prepared_path(source, encoder, options, folder) != path:
        path.unlink()
        raise DataError(f"{source.name} changed while it was read; start again when nothing writes to it")
    return TokenizedDataset.load(path, processor=processor)
