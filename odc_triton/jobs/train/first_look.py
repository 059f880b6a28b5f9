"""What can be said of a run before torch is imported, which takes many seconds on a busy machine."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from ...base.files import reading, require_source
from ...checkpoint.adapted import ADAPTER, CONFIG
from ..data.preferences import PairSource
from ..data.sources import RecordSource, hub_id_of, open_source
from ..rl.prompts import prompt_of
from .grpo_options import GrpoOptions
from .pairs_options import PairOptions
from .run_folder import RunFolder, report_ended
from .run_options import RunOptions

_RECORDS = 16  # of each file


def is_over(options: RunOptions, ranks: int) -> bool:
    """True if the run in `out` has ended and nothing is left to do, which is printed.

    Raises OSError and ValueError for models that are not there, records that can't be read, another run in `out`.
    """
    for source in (options.init, options.tokenizer):
        if source is not None:
            require_source(source)
    for source in (options.model, options.teacher):
        if source is not None:
            _require_model(source)
    for name in (*options.data, options.eval_data):
        if name is not None and hub_id_of(name) is None:
            for _ in islice(_records(options, open_source(name, options.columns)), _RECORDS):
                pass
    folder = RunFolder(options.out)
    folder.lock(resume=options.resume)
    try:
        if not folder.goes_on(options.resume) or not (saved := folder.identity) or not saved.get("dtype"):
            return False
        identity = options.identity(ranks) | {"dtype": options.dtype or saved["dtype"]}
        changed = folder.check(identity)
        if options.push_to_hub is not None or not folder.has_ended(identity):
            return False
        report_ended(folder, options, changed)
        return True
    finally:
        folder.release()


def _require_model(source: str) -> None:
    """Of a hub id it reads the config, as transformers will."""
    with reading(source):
        if not Path(source).exists():
            from huggingface_hub import hf_hub_download
            from huggingface_hub.errors import EntryNotFoundError

            try:
                hf_hub_download(source, CONFIG)
            except EntryNotFoundError:
                hf_hub_download(source, ADAPTER)


def _records(options: RunOptions, source: RecordSource) -> Iterable[Any]:
    if isinstance(options, GrpoOptions):
        return (prompt_of(where, row) for where, row, _ in source.rows())
    return PairSource(source) if isinstance(options, PairOptions) else source
