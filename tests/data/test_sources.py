"""Where records come from: files, tables, data sets of Hugging Face."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading

import pytest

from odc_triton.data.dataset import DataOptions, tokenize_source
from odc_triton.data.dataset import TokenizedDataset as Data
from odc_triton.data.json_files import read_records
from odc_triton.data.prepared import prepare_data
from odc_triton.data.records import DataError
from odc_triton.data.sources import File, Rows, open_source
from odc_triton.data.tables import read_rows
from tests.support.deadlines import LONG_S
from tests.support.records import CHARACTERS, ENCODER, NEVER, samples_of, write_lines

ROWS = [
    {"text": "ab", "prompt": None, "completion": None, "messages": None},
    {"text": None, "prompt": "a", "completion": "xy", "messages": None},
    {"text": None, "prompt": None, "completion": None, "messages": [{"role": "user", "content": "a", "name": None}]},
]


def test_rows_are_read_like_lines(tmp_path):
    path = write_lines(tmp_path / "data.jsonl", {"text": "ab"}, {"prompt": "a", "completion": "xy"})
    calls = []
    tokenize_source(
        Rows(ROWS[:2], "rows"),
        CHARACTERS,
        tmp_path / "rows.npz",
        DataOptions(batch_records=1),
        lambda *a: calls.append(a),
    )
    tokenize_source(File(path), CHARACTERS, tmp_path / "lines.npz")
    assert samples_of(Data.load(tmp_path / "rows.npz")) == samples_of(Data.load(tmp_path / "lines.npz"))
    assert calls == [(1, 0.5), (2, 1.0)]
    forms = [record.form for record in read_rows(ROWS, "rows")]
    assert forms == ["text", "prompt and completion", "messages"]
    assert list(read_rows(ROWS, "rows"))[2].messages == [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "rows has no rows"),
        ([{"text": "a"}, ["b"]], "rows, row 1: a list, not an object"),
        ([{"text": None}], r"rows, row 0: needs 'text'.*it has 'text' \(null\)"),
        ([{3: "a", "x": 1}], "rows, row 0: needs 'text'.*it has '3', 'x'"),
        ([{"text": b"a"}], "'text' must be a string, not bytes"),
        ([{"messages": [{"role": "user", "content": "a", "at": object()}]}], "not JSON: Object of type object is not"),
    ],
)
def test_unusable_row_is_named(rows, message):
    with pytest.raises(DataError, match=message):
        list(read_rows(rows, "rows"))


def test_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "data:1.jsonl", {"text": "a"})
    assert [record.completion for record in open_source("data:1.jsonl")] == ["a"]
    for name in ("missing.jsonl", "missing.JSONL:train", "./missing", "/missing/data", "a/b/c", "~/x"):
        with pytest.raises(DataError, match="cannot be read: No such file or directory"):
            open_source(name)
    for name in ("", "a\0b"):
        with pytest.raises(DataError, match="names no data"):
            open_source(name)


def test_missing_library_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "state.json").touch()
    for name, why in (
        ("owner/name:train", "not a local file, so it was taken for a data set on the hub"),
        (str(tmp_path), "is a data set of `save_to_disk`"),
        (f"{tmp_path}:test", "is a data set of `save_to_disk`"),
    ):
        with pytest.raises(DataError, match=rf'{why}.*needs the `datasets` library: pip install "odc-triton\[data\]"'):
            open_source(name)


def test_pipe_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    outcome = []

    def read():
        try:
            list(read_records(tmp_path / "pipe"))
        except DataError as error:
            outcome.append(str(error))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(LONG_S)
    assert outcome == [f"{tmp_path / 'pipe'} cannot be read: it is not a regular file"]


# --- the real library ---------------------------------------------------------------------------------------


@pytest.fixture
def library():
    return pytest.importorskip("datasets")


def made(library, rows):
    # Its own way to a fingerprint, Dataset.from_list, pickles pyarrow's module, which some pairs of versions can't.
    table = library.table.InMemoryTable.from_pylist(rows)
    return library.Dataset(table, fingerprint=hashlib.sha256(repr(rows).encode()).hexdigest()[:16])


def test_saved_data_set(library, tmp_path):
    both = library.DatasetDict(train=made(library, ROWS[:2]), test=made(library, [{"text": "from the test split"}]))
    both.save_to_disk(tmp_path / "both")
    both["test"].save_to_disk(tmp_path / "one")
    assert [record.form for record in open_source(str(tmp_path / "both"))] == ["text", "prompt and completion"]
    for name in (f"{tmp_path}/both:test", f"{tmp_path}/one"):
        assert [record.completion for record in open_source(name)] == ["from the test split"]
    with pytest.raises(DataError, match=r"has no split 'dev'; give one of .*both:train, .*both:test"):
        open_source(f"{tmp_path}/both:dev")
    with pytest.raises(DataError, match="is one data set without splits; leave out ':train'"):
        open_source(f"{tmp_path}/one:train")
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(DataError, match="cannot be read as a data set: "):
        open_source(str(tmp_path))

    kept = tmp_path / "kept"
    first = prepare_data(f"{tmp_path}/both", ENCODER, folder=kept)
    assert samples_of(prepare_data(f"{tmp_path}/both", NEVER, folder=kept)) == samples_of(first)
    made(library, ROWS[1:2]).save_to_disk(tmp_path / "one")
    assert len(prepare_data(f"{tmp_path}/one", ENCODER, folder=kept)) == 1


def test_conversations_of_a_saved_data_set(library, tmp_path):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    made(library, [{"messages": messages, "prompt": "a"}] * 3).save_to_disk(tmp_path / "chats")
    assert [record.messages for record in open_source(str(tmp_path / "chats"))] == [messages] * 3


def test_hub_that_is_out_of_reach(library):
    program = "from odc_triton.data.sources import open_source\nopen_source('nobody/nothing:train')"
    offline = os.environ | {"HF_HUB_OFFLINE": "1"}  # read when the library is imported
    done = subprocess.run([sys.executable, "-c", program], env=offline, capture_output=True, text=True, check=False)
    assert "nobody/nothing:train cannot be read as a data set: " in done.stderr.splitlines()[-1]
