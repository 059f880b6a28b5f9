"""Prepared data: samples made once, kept in a folder, and found again on the next start.

The file's name holds a hash of everything that the samples depend on: path, size and times of the data (for a data
set of `datasets`, its fingerprint), the tokenizer with its chat template and library, `DataOptions`, and the
version of this format. So nothing is ever stale: a change gives another name, and files that are no longer needed may
be deleted at any time. Checksums are compared before a file is used again; a damaged one is rewritten.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path

from .dataset import DataOptions, TokenizedDataset, tokenize_source
from .records import DataError
from .sources import Source, open_source
from .tokenizer import TextEncoder

# Goes up whenever the same records would give other samples, or the file's layout changes.
FORMAT = 2
FOLDER = "ODC_TRITON_CACHE"


def prepare_data(
    source: str | Source,
    encoder: TextEncoder,
    options: DataOptions | None = None,
    *,
    folder: str | os.PathLike | None = None,
    progress: Callable[[int, float], None] | None = None,
) -> TokenizedDataset:
    """The samples of `source` (see `sources.open_source`), from `folder` if they were prepared before.

    One rank of a machine calls it; the others `TokenizedDataset.load` the `path` of the result, and share its
    pages. `folder` is `default_folder()` unless given. Raises DataError for unusable data, and for data that change
    while they are read; OSError if `folder` can't be written; ValueError if source or encoder has no fingerprint.
    """
    options = options or DataOptions()
    source = open_source(source) if isinstance(source, str) else source
    folder = default_folder() if folder is None else Path(folder)
    fingerprint = source.fingerprint()
    path = prepared_path(source, encoder, options, folder)
    if path.exists():
        try:
            return TokenizedDataset.load(path, verify=True)
        except DataError as error:
            warnings.warn(f"the data are prepared again: {error}", RuntimeWarning, stacklevel=2)
    tokenize_source(source, encoder, path, options, progress)
    if source.fingerprint() != fingerprint:
        path.unlink()
        raise DataError(f"{source.name} changed while it was read; start again when nothing writes to it")
    return TokenizedDataset.load(path)


def prepared_path(source: Source, encoder: TextEncoder, options: DataOptions, folder: str | os.PathLike) -> Path:
    """Where `prepare_data` keeps these samples. Raises ValueError if source or encoder has no fingerprint."""
    parts = (source.fingerprint(), encoder.fingerprint)
    if None in parts:
        raise ValueError(
            f"{source.name} or its encoder has no fingerprint, so its samples could not be found again; give one, or "
            "write them to a path of your own with tokenize_source"
        )
    key = json.dumps([FORMAT, *parts, options.max_tokens, options.too_long])
    return Path(folder) / f"{_stem(source)}-{hashlib.sha256(key.encode(errors='surrogateescape')).hexdigest()[:32]}.npz"


def default_folder() -> Path:
    """$ODC_TRITON_CACHE, or odc-triton in the user's cache folder ($XDG_CACHE_HOME, ~/.cache)."""
    given = os.environ.get(FOLDER)
    return Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "odc-triton"


def _stem(source: Source) -> str:
    """A readable part of the file name, for people who look into the folder."""
    return re.sub(r"[^\w.-]+", "_", Path(source.name).name, flags=re.ASCII)[:60] or "data"
