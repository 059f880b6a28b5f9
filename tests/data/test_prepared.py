"""Prepared data: found again, made anew when anything changed or is damaged, in memory that does not grow."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from odc_triton.jobs.data import encode
from odc_triton.jobs.data.dataset import DataOptions, TokenizedDataset, split_samples
from odc_triton.jobs.data.prepared import prepare_data
from odc_triton.jobs.data.records import DataError
from odc_triton.jobs.data.tokenizer import TextEncoder
from tests.support.chats import CHATML, MARKED, make_tokenizer
from tests.support.records import CHARACTERS, ENCODER, NEVER, never, samples_of, write_lines
from tests.support.tokenized import tokenize_file


@pytest.fixture
def path(tmp_path):
    return write_lines(tmp_path / "data.jsonl", {"text": "abc"}, {"prompt": "a", "completion": "xy"})


def test_samples_are_found_again(path, tmp_path):
    first = prepare_data(str(path), ENCODER, folder=tmp_path / "kept")
    again = prepare_data(str(path), NEVER, folder=tmp_path / "kept")
    assert samples_of(again) == samples_of(first) == samples_of(tokenize_file(path, ENCODER))
    assert again.summary == first.summary
    assert again.path == first.path
    assert [each.name for each in (tmp_path / "kept").iterdir()] == [first.path.name]
    assert first.path.name.startswith("data.jsonl-")
    assert samples_of(TokenizedDataset.load(first.path)) == samples_of(first)  # what the other ranks do
    with np.load(first.path, allow_pickle=False) as plain:
        assert plain["tokens"].tolist() == first.tokens.tolist()


def test_any_change_is_another_file(path, tmp_path):
    folder = tmp_path / "kept"
    prepare_data(str(path), ENCODER, folder=folder)
    for encoder, options in (
        (replace(ENCODER, fingerprint="another"), None),
        (ENCODER, DataOptions(max_tokens=100)),
        (ENCODER, DataOptions(too_long="drop")),
    ):
        with pytest.raises(AssertionError, match="tokenised again"):
            prepare_data(str(path), replace(encoder, encode_batch=never), options, folder=folder)
        prepare_data(str(path), encoder, options, folder=folder)
    prepare_data(os.path.relpath(path), NEVER, folder=folder)
    with pytest.raises(ValueError, match=r"data\.jsonl or its encoder has no fingerprint"):
        prepare_data(str(path), CHARACTERS, folder=folder)


def test_a_folder_whose_files_change(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("a", "b"):
        write_lines(folder / f"{name}.jsonl", {"text": name})
    assert len(prepare_data(str(folder), ENCODER, folder=tmp_path / "kept")) == 2
    assert len(prepare_data(str(folder), NEVER, folder=tmp_path / "kept")) == 2
    # Edited in place, with its size and date kept.
    before = (folder / "b.jsonl").stat()
    (folder / "b.jsonl").write_text('{"text": "c"}\n')
    os.utime(folder / "b.jsonl", ns=(before.st_atime_ns, before.st_mtime_ns))
    after = (folder / "b.jsonl").stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    again = prepare_data(str(folder), ENCODER, folder=tmp_path / "kept")
    assert samples_of(again)[1][0] == [2, ord("c"), 1]
    write_lines(folder / "c.jsonl", {"text": "d"})
    assert len(prepare_data(str(folder), ENCODER, folder=tmp_path / "kept")) == 3


def test_fingerprints_of_tokenizers():
    kinds = [TextEncoder.of(make_tokenizer(template)).fingerprint for template in (CHATML, MARKED, None, CHATML)]
    assert kinds[0] == kinds[3]
    assert len(set(kinds)) == 3
    tokenizer = make_tokenizer(CHATML)
    tokenizer.eos_token = "<|im_end|>"
    kinds.append(TextEncoder.of(tokenizer).fingerprint)
    tokenizer.backend_tokenizer.add_tokens(["yes"])
    kinds.append(TextEncoder.of(tokenizer).fingerprint)
    tokenizer.split_special_tokens = True  # which no file of the tokenizer's library has
    kinds.append(TextEncoder.of(tokenizer).fingerprint)
    assert len(set(kinds)) == 6


@pytest.mark.parametrize("damage", ["tokens", "cut"])
def test_damaged_file_is_made_anew(path, tmp_path, damage):
    first = prepare_data(str(path), ENCODER, folder=tmp_path / "kept")
    wanted, file = samples_of(first), first.path
    raw = bytearray(file.read_bytes())
    at = raw.index(first.tokens.tobytes())
    assert at % 64 == 0  # mapped as it lies
    raw[at + first.tokens.itemsize] ^= 1  # only checksums see it
    file.write_bytes(raw if damage == "tokens" else raw[: len(raw) // 2])
    with pytest.warns(RuntimeWarning, match="the data are prepared again: .* is not a prepared data set"):
        again = prepare_data(str(path), ENCODER, folder=tmp_path / "kept")
    assert samples_of(again) == wanted
    assert samples_of(prepare_data(str(path), NEVER, folder=tmp_path / "kept")) == wanted


def test_nothing_is_left_of_a_preparation_that_failed(path, tmp_path, monkeypatch):
    folder = tmp_path / "kept"
    with path.open("a") as file:
        file.write("broken\n")
    monkeypatch.setattr(encode, "_BATCH_RECORDS", 1)
    seen = []
    with pytest.raises(DataError, match="line 3: not valid JSON"):
        prepare_data(str(path), ENCODER, folder=folder, progress=lambda *_: seen.append(list(folder.iterdir())))
    assert seen == [[], []]  # also while it ran: a kill leaves nothing
    assert list(folder.iterdir()) == []


def test_file_that_grows_while_it_is_read_is_refused(path, tmp_path):
    def grow(*_):
        with path.open("a") as file:
            file.write("\n")

    with pytest.raises(DataError, match=r"data\.jsonl changed while it was read"):
        prepare_data(str(path), ENCODER, folder=tmp_path / "kept", progress=grow)
    assert list((tmp_path / "kept").iterdir()) == []


def test_file_that_cannot_be_written_is_named(path, tmp_path):
    program = (
        "import resource, sys; from odc_triton.jobs.data.prepared import prepare_data\n"
        "from tests.support.records import ENCODER\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
        "prepare_data(sys.argv[1], ENCODER, folder=sys.argv[2])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, path, tmp_path / "kept"], capture_output=True, text=True, check=False
    )
    assert "[Errno 27] File too large while the samples were written: '" in done.stderr
    assert list((tmp_path / "kept").iterdir()) == []


def test_samples_are_pages_of_the_file(path, tmp_path):
    data = prepare_data(str(path), ENCODER, folder=tmp_path / "kept")
    for values in (data.tokens, data.offsets, data.spans):
        assert isinstance(values.base, np.memmap)
        assert values.base.mode == "r"
        assert values.flags.aligned
        with pytest.raises(ValueError, match="read-only"):
            values[0] = 0
    sent = pickle.dumps(data)  # to a worker process of a DataLoader
    assert len(sent) < 500
    assert samples_of(pickle.loads(sent)) == samples_of(data)
    unnamed = tokenize_file(path, ENCODER)
    assert unnamed.path is None
    assert samples_of(pickle.loads(pickle.dumps(unnamed))) == samples_of(unnamed)


def test_memory_does_not_grow_with_the_file(tmp_path, monkeypatch):
    records = ({"text": f"{number} " + "word " * 600} for number in range(2000))
    path = write_lines(tmp_path / "data.jsonl", *records)
    monkeypatch.setattr(encode, "_BATCH_RECORDS", 64)
    options = DataOptions(max_tokens=5000)
    tracemalloc.start()  # which sees what numpy allocates, and no pages of files
    try:
        data = prepare_data(str(path), ENCODER, options, folder=tmp_path / "kept")
        assert sum(int(sample["labels"][-1] > 0) for sample in data) == 2000
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # A batch takes 2 MB as lists of Python's numbers; offsets and spans grow by 24 bytes with each sample.
    assert peak < 8e6 < 24e6 < data.tokens.nbytes


# --- order and splits ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    path = tmp_path_factory.mktemp("many") / "data.jsonl"
    write_lines(path, *({"text": "a" * (number % 17)} for number in range(50)))
    return tokenize_file(path, CHARACTERS)


def test_split_is_by_seed_and_number_alone(many):
    train, evaluation = split_samples(many, 0.2, seed=3)
    assert evaluation.indices.tolist() == [2, 21, 27, 30, 31, 34, 36, 44, 45, 46]  # written down once: it must stay
    assert sorted([*train.indices, *evaluation.indices]) == list(range(50))
    assert split_samples(many, 10, seed=3)[1].indices.tolist() == evaluation.indices.tolist()
    assert split_samples(many, 10, seed=4)[1].indices.tolist() != evaluation.indices.tolist()
    # A larger one takes more, not others.
    assert set(evaluation.indices) < set(split_samples(many, 20, seed=3)[1].indices)
    assert len(split_samples(many, 0.001)[1]) == 1


@pytest.mark.parametrize("wrong", [0, -0.5, 1.5, float("nan"), 50, 51, 0.999])
def test_split_that_leaves_nothing_is_refused(many, wrong):
    with pytest.raises(ValueError, match=r"evaluation split .*(give a number|would take 5\d of 50 samples)"):
        split_samples(many, wrong)
