"""Records to samples: the reader, the samples, the stored data set."""

from __future__ import annotations

import json
import sys
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odc_triton.jobs.data.dataset import DataOptions, DataSummary, TokenizedDataset
from odc_triton.jobs.data.records import DataError
from odc_triton.jobs.data.tokenizer import TextEncoder
from tests.support.records import CHARACTERS, RECORDS, samples_of, tokenized, write_lines
from tests.support.tokenized import tokenize_file

a, b, c, x, y = map(ord, "abcxy")


# --- samples ------------------------------------------------------------------------------------------------


def test_samples_by_hand(tmp_path):
    data = tokenized(
        tmp_path,
        {"prompt": "ab", "completion": "xy", "id": 7},
        {"text": "abc"},
        {"completion": "", "prompt": ""},
        {"text": "a\x01"},  # ends with the end token already
        {"text": ""},
        {"text": "\x02a"},  # begins with the begin token already
    )
    assert samples_of(data) == [
        ([3, a, b, 4, x, y, 1], [-100, -100, -100, -100, x, y, 1]),
        ([2, a, b, c, 1], [2, a, b, c, 1]),
        ([3, 4, 1], [-100, -100, 1]),
        ([2, a, 1], [2, a, 1]),
        ([2, 1], [2, 1]),
        ([2, a, 1], [2, a, 1]),
    ]
    assert data.lengths.tolist() == [7, 5, 3, 3, 2, 3]
    assert len(data) == 6
    assert data.tokens.dtype == np.int32
    assert data[0]["input_ids"].dtype == data[0]["labels"].dtype == np.int64
    assert data.summary.tokens == 23
    assert data.summary.target_tokens == 3 + 4 + 1 + 2 + 1 + 2


def test_samples_can_be_changed_and_indexed_from_the_end(tmp_path):
    data = tokenized(tmp_path, {"text": "ab"}, {"text": "c"})
    data[0]["input_ids"][:] = 0
    assert data[0]["input_ids"].tolist() == data[np.int64(-2)]["input_ids"].tolist() == [2, a, b, 1]
    for index in (2, -3):
        with pytest.raises(IndexError, match=f"sample {index} of 2 samples"):
            data[index]


GROWING = (
    {"prompt": "a", "completion": "x"},  # 5 tokens
    {"prompt": "a", "completion": "xy"},  # 6
    {"prompt": "abca", "completion": "x"},  # 8, the prompt fills 6
)


def test_too_long(tmp_path):
    data = tokenized(tmp_path, *GROWING, max_tokens=5)
    assert samples_of(data) == [
        ([3, a, 4, x, 1], [-100, -100, -100, x, 1]),
        ([3, a, 4, x, y], [-100, -100, -100, x, y]),
    ]
    assert (data.summary.truncated, data.summary.dropped_no_target, data.summary.dropped_too_long) == (1, 1, 0)
    assert data.summary.target_tokens == 4
    data = tokenized(tmp_path, *GROWING, max_tokens=6, too_long="drop")
    assert data.lengths.tolist() == [5, 6]
    assert (data.summary.truncated, data.summary.dropped_no_target, data.summary.dropped_too_long) == (0, 0, 1)
    assert len(tokenized(tmp_path, *GROWING, max_tokens=8, too_long="error")) == 3
    with pytest.raises(DataError, match=r"leaves no sample.*3 dropped as too long.*the cap is 4 tokens; raise"):
        tokenized(tmp_path, *GROWING, max_tokens=4, too_long="drop")
    with pytest.raises(DataError, match=r"data.jsonl, line 3: 8 tokens, more than the cap of 7; raise"):
        tokenized(tmp_path, *GROWING, max_tokens=7, too_long="error")
    with pytest.raises(ValueError, match="max_tokens is 1; it must be at least 2"):
        DataOptions(max_tokens=1)


@settings(max_examples=60)
@given(
    records=RECORDS,
    max_tokens=st.integers(2, 14),
    too_long=st.sampled_from(["truncate", "drop"]),
    ascii_only=st.booleans(),
    marks=st.booleans(),
)
def test_samples_against_a_plain_loop(tmp_path_factory, records, max_tokens, too_long, ascii_only, marks):
    path = tmp_path_factory.getbasetemp() / "random.jsonl"
    lines = [json.dumps(record, ensure_ascii=ascii_only) for record in records]
    path.write_bytes("\n\r\n".join(lines).encode())
    encoder = CHARACTERS if marks else TextEncoder(encode_batch=CHARACTERS.encode_batch, end_id=1)
    expected, dropped = [], 0
    for record in records:
        if "text" in record:
            ids = [2] * marks + [ord(character) for character in record["text"]] + [1]
            labels = list(ids)
        else:
            prompt = [3] * marks + [ord(character) for character in record["prompt"]] + [4] * marks
            learned = [ord(character) for character in record["completion"]] + [1]
            ids, labels = prompt + learned, [-100] * len(prompt) + learned
        if len(ids) > max_tokens and too_long == "drop":
            dropped += 1
            continue
        ids, labels = ids[:max_tokens], labels[:max_tokens]
        if any(label != -100 for label in labels[1:]):
            expected.append((ids, labels))

    options = DataOptions(max_tokens=max_tokens, too_long=too_long)
    if not expected:
        with pytest.raises(DataError, match="leaves no sample"):
            tokenize_file(path, encoder, options)
        return
    data = tokenize_file(path, encoder, options)
    assert samples_of(data) == expected
    assert data.lengths.tolist() == [len(ids) for ids, _ in expected]
    summary = data.summary
    assert summary.target_tokens == sum(label != -100 for _, labels in expected for label in labels[1:])
    assert summary.dropped_too_long == dropped
    assert summary.records == len(records) == summary.samples + dropped + summary.dropped_no_target

    stored = path.with_suffix(".npz")
    data.save(stored)
    again = TokenizedDataset.load(stored)
    assert samples_of(again) == expected
    assert again.summary == summary
    assert (again.tokens.dtype, again.offsets.dtype) == (np.int32, np.int64)


# --- what the reader refuses --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a"', "not valid JSON in UTF-8: Expecting ',' delimiter, at character 13; every line"),
        (b'["text"]', "a list, not an object with 'text'"),
        (b"{}", r"needs 'text', or both 'prompt' and 'completion', or .* \(Alpaca\); it has no field"),
        (
            rb'{"messages": [{"role": "user", "content": "a", "name": "\ud800"}]}',
            r"message 0 has another field than .* is not JSON: .*surrogates not allowed; leave it out",
        ),
        (b'{"messages": [{"role": "assistant", "content": null, "tool_calls": []}]}', "message 0 needs 'role' and"),
        (b'{"messages": [{"role": "user", "content": null, "tool_calls": [{}]}]}', "message 0 needs 'role' and"),
        (b'{"messages": [{"role": "user", "content": "a"}]}', "messages need a chat template, and a bare tokenizer"),
        (b'{"text": "a", "prompt": "b"}', "has 'text' and also 'prompt'; keep one"),
        ('{"text": "é"}'.encode("latin-1"), "not valid JSON in UTF-8: .* can't decode byte 0xe9 in position 10"),
        (rb'{"text": "a\ud800"}', "'text' has half a surrogate pair at character 1"),
    ],
)
def test_unusable_line_is_named(tmp_path, line, message):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"text": "fine"}\n\n' + line)
    with pytest.raises(DataError, match=f"(?s)data.jsonl, line 3: .*{message}"):
        tokenize_file(path, CHARACTERS)


# --- the stored data set ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stored")
    lines = write_lines(folder / "data.jsonl", {"text": "abc"}, {"prompt": "a", "completion": "x"})
    tokenize_file(lines, CHARACTERS).save(folder / "data.npz")
    return folder / "data.npz"


@settings(max_examples=60)
@given(at=st.floats(0, 1), change=st.binary(min_size=1, max_size=30), keep=st.booleans())
def test_damage_is_noticed_or_changes_nothing(stored, at, change, keep):
    content = stored.read_bytes()
    position = int(at * len(content))
    path = stored.with_name("damaged.npz")
    path.write_bytes(content[:position] + change + (content[position + len(change) :] if keep else b""))
    try:
        data = TokenizedDataset.load(path, verify=True)
    except DataError as error:
        assert "damaged.npz" in str(error)  # noqa: PT017 - whether it raises depends on the damage
    else:
        assert samples_of(data) == samples_of(TokenizedDataset.load(stored))


class Bomb:
    def __reduce__(self):
        return (sys.exit, ("went off",))


@pytest.mark.parametrize(
    "change",
    [
        {"offsets": np.array([0, 10])},  # another number of samples than in the summary
        {"offsets": np.array([0, 5, 10], np.int32)},
        {"offsets": np.array([[0, 5, 10]])},
        {"spans": np.array([[0, 5, 8]])},
        {"spans": np.array([0, 5])},
        {"tokens": np.zeros((10, 1), np.int32)},
        {"tokens": np.zeros(9, np.int32)},
        {"tokens": np.array([Bomb()] * 10)},
        {"tokens": np.zeros((1, 10), np.int32, "F")},
        {"meta": np.array("[]")},
        {"meta": np.array('{"samples": 2}')},
        {"meta": np.array(json.dumps(dict.fromkeys((each.name for each in fields(DataSummary)), 2)))},
        {"meta": np.array([Bomb()])},
    ],
)
def test_arrays_that_do_not_belong_together_are_refused(stored, tmp_path, change):
    path = tmp_path / "data.npz"
    with np.load(stored) as arrays:
        fine = dict(arrays)
    assert fine["offsets"].tolist() == [0, 5, 10]
    np.savez(path, **fine)
    assert samples_of(TokenizedDataset.load(path)) == samples_of(TokenizedDataset.load(stored))
    np.savez(path, **{**fine, **change})
    with pytest.raises(DataError, match=r"data\.npz is not a prepared data set .*; prepare it again"):
        TokenizedDataset.load(path)


def test_load_names_a_missing_file_and_another_format(stored, tmp_path):
    with pytest.raises(DataError, match=r"none\.npz cannot be read: No such file"):
        TokenizedDataset.load(tmp_path / "none.npz")
    np.save(tmp_path / "one.npy", np.arange(3))
    np.savez_compressed(tmp_path / "packed.npz", **np.load(stored))
    for name in ("one.npy", "packed.npz"):
        with pytest.raises(DataError, match=f"{name} is not a prepared data set"):
            TokenizedDataset.load(tmp_path / name)
