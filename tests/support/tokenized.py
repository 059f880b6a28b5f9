"""A file's samples, tokenised as training prepares them."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory

from odc_triton.jobs.data.dataset import DataOptions, TokenizedDataset, tokenize_source
from odc_triton.jobs.data.sources import RecordFiles
from odc_triton.jobs.data.tokenizer import TextEncoder


def tokenize_file(
    path: str | os.PathLike, encoder: TextEncoder, options: DataOptions | None = None
) -> TokenizedDataset:
    """The samples of a file of JSON lines, in its order."""
    with TemporaryDirectory() as folder:
        prepared = Path(folder) / "data.npz"
        tokenize_source(RecordFiles([path]), encoder, prepared, options)
        data = TokenizedDataset.load(prepared)
    data.path = None
    return data
