"""Records far longer than a sample may be: memory stays bounded, samples stay the same."""

from __future__ import annotations

from dataclasses import replace

import pytest

from odc_triton.data import chat, json_files
from odc_triton.data.dataset import DataOptions, tokenize_file
from odc_triton.data.json_files import LARGEST_LINE_BYTES
from odc_triton.data.records import DataError
from odc_triton.data.tokenizer import TextEncoder
from tests.support.chats import WRITERS, make_tokenizer
from tests.support.records import CHARACTERS, samples_of, write_lines


@pytest.mark.parametrize(
    ("begin", "remedy"),
    [
        (b'{"text": "fine"}\n{"text": "', "line 2: longer than 16 MiB, .*split its text"),
        (
            b'[{"text": "',
            "is a JSON array of more than 0.03125 GiB, which would be read whole; write one",
        ),
    ],
)
def test_what_is_past_the_bound_is_named_and_not_read_whole(tmp_path, monkeypatch, begin, remedy):
    monkeypatch.setattr(json_files, "_LARGEST_ARRAY_BYTES", 2**25)
    path = tmp_path / "data.jsonl"
    with open(path, "wb") as file:
        file.write(begin)
        file.truncate(50 * 2**30)  # a hole: what is read whole does not fit into memory
    with pytest.raises(DataError, match=rf"data\.jsonl,? {remedy}"):
        tokenize_file(path, CHARACTERS, DataOptions(too_long="truncate"))


def test_the_longest_line_is_read(tmp_path):
    path = tmp_path / "data.jsonl"
    for spare, records in ((0, 2), (-1, None)):
        line = b'{"text": "a", "x": "%s"}' % (b"x" * (LARGEST_LINE_BYTES - 23 - spare))
        assert len(line) == LARGEST_LINE_BYTES - 1 - spare
        path.write_bytes(line + b'\n{"text": "b"}\n')
        if records is None:
            with pytest.raises(DataError, match="line 1: longer than 16 MiB"):
                tokenize_file(path, CHARACTERS)
        else:
            assert tokenize_file(path, CHARACTERS).summary.records == records


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
