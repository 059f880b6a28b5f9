"""Records in files, and a tokenizer so simple that their samples can be written down by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from hypothesis import strategies as st

from odc_triton.jobs.data.dataset import DataOptions, TokenizedDataset
from odc_triton.jobs.data.tokenizer import TextEncoder
from tests.support.tokenized import tokenize_file

# One id per character, so that samples can be written down by hand. 1 ends a sample, 2 to 4 begin its parts.
CHARACTERS = TextEncoder(
    encode_batch=lambda texts: [[ord(character) for character in text] for text in texts],
    end_id=1,
    before_text=(2,),
    before_prompt=(3,),
    before_completion=(4,),
)


def write_lines(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def tokenized(folder: Path, *records: object, encoder: TextEncoder = CHARACTERS, **options: object) -> TokenizedDataset:
    """Samples of records that are written into a file in `folder`."""
    return tokenize_file(write_lines(folder / "data.jsonl", *records), encoder, DataOptions(**options))


def samples_of(data: TokenizedDataset) -> list[tuple[list[int], list[int]]]:
    return [(sample["input_ids"].tolist(), sample["labels"].tolist()) for sample in data]


TEXTS = st.text(st.sampled_from("ab\n\0é\u2028😀"), max_size=8)
RECORDS = st.lists(
    st.one_of(st.fixed_dictionaries({"text": TEXTS}), st.fixed_dictionaries({"prompt": TEXTS, "completion": TEXTS})),
    min_size=1,
    max_size=12,
)


ENCODER = replace(CHARACTERS, fingerprint="characters")


def never(texts: list[str]) -> list[list[int]]:
    raise AssertionError("tokenised again")


NEVER = replace(ENCODER, encode_batch=never)
