"""Records far longer than a sample may be: memory stays bounded, samples stay the same."""

from __future__ import annotations

from dataclasses import replace

import pytest

from odc_triton.jobs.data import chat
from odc_triton.jobs.data.dataset import DataOptions
from odc_triton.jobs.data.records import DataError
from odc_triton.jobs.data.tokenizer import TextEncoder
from tests.support.chats import WRITERS, make_tokenizer
from tests.support.records import CHARACTERS, samples_of, write_lines
from tests.support.tokenized import tokenize_file


@pytest.mark.parametrize("too_long", ["truncate", "drop", "error"])
def test_what_is_cut_off_is_not_tokenised(tmp_path, too_long):
    given = []

    def encode(texts):
        given.extend(map(len, texts))
        return CHARACTERS.encode_batch(texts)

    path = write_lines(
        tmp_path / "data.jsonl", {"text": "ab" * 500_000}, {"prompt": "a", "completion": "b" * 10**6}, {"text": "ab"}
    )
    encoder, options = replace(CHARACTERS, encode_batch=encode), DataOptions(max_tokens=8, too_long=too_long)
    if too_long == "error":
        with pytest.raises(DataError, match=r"data\.jsonl, line 1: at least \d+ tokens, more than the cap of 8; raise"):
            tokenize_file(path, encoder, options)
    else:
        assert len(tokenize_file(path, encoder, options)) == (3 if too_long == "truncate" else 1)
    assert max(given) == 8 * chat.CHARACTERS_PER_TOKEN


WORDS = "the user asks and the assistant says no " * 40


@pytest.mark.parametrize("name", ["text", *WRITERS])
def test_samples_are_those_of_the_whole(tmp_path, monkeypatch, name):
    contents = [("hello", WORDS), (WORDS, "yes"), ("why", "no", WORDS, WORDS), ("a", "\n" * 5000 + "yes", "b", "no")]
    if name == "text":
        records = [{"text": each} for some in contents for each in some]
    else:
        roles = ("user", "assistant") * 2
        records = [
            {"messages": [{"role": role, "content": text} for role, text in zip(roles, some, strict=False)]}
            for some in (contents if "marked" in name else contents[:3])
        ]
    tokenizer = make_tokenizer(None if name == "text" else WRITERS[name][0])
    encoder = TextEncoder.of(tokenizer)
    path = write_lines(tmp_path / "data.jsonl", *records)

    def samples(characters: int, most: int) -> list:
        monkeypatch.setattr(chat, "CHARACTERS_PER_TOKEN", characters)
        return samples_of(tokenize_file(path, encoder, DataOptions(max_tokens=most)))

    for most in (40, 90):
        for characters in (1, 16):  # too few for so many tokens, so that the whole is needed, and enough
            assert samples(characters, most) == samples(10**6, most)
