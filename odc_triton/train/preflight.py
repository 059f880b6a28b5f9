"""What can be known to be wrong before the ranks start: the model, the data's first records, the folder to write to.

Ranks take a while to start, and tokenising a large file takes longer: what a run needs after that is looked at first.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from ..checkpoint import meta_causal_lm
from ..checkpoint.pretrained import require_weights
from ..data.dataset import encode_records
from ..data.sources import open_source
from ..data.tokenizer import TextEncoder
from .folder import RunFolder
from .prepare import check_fit, load_any_tokenizer
from .sft_options import SftOptions

_RECORDS = 16  # of each source


def check_before_start(options: SftOptions) -> None:
    """Raises OSError and ValueError for what would end the run later. Leaves nothing but the folder `out`."""
    model = meta_causal_lm(model=options.model, init=options.init)
    if options.model is not None and Path(options.model).is_dir():
        require_weights(options.model)
    encoder = TextEncoder.of(load_any_tokenizer(options))
    for name in (options.data, options.eval_data):
        if name is not None:
            head = encode_records(list(islice(open_source(name), _RECORDS)), encoder, options.token_cap)
            check_fit(model, longest=0, largest_token=max(max(ids, default=0) for ids, _ in head))
    folder = RunFolder(options.out)
    folder.lock(resume=options.resume)
    folder.release()
