"""The same records in every kind of file, and in folders of files: the same samples, or an error that says what."""

from __future__ import annotations

import csv
import gzip
import io
import json
import lzma
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from odc_triton.jobs.data.dataset import TokenizedDataset, tokenize_source
from odc_triton.jobs.data.records import DataError
from odc_triton.jobs.data.sources import open_source
from odc_triton.jobs.data.tokenizer import TextEncoder
from tests.support.chats import make_tokenizer, said
from tests.support.deadlines import LONG_S
from tests.support.records import CHARACTERS, samples_of, write_lines
from tests.support.tokenized import tokenize_file

TOOLS = [{"name": "add", "p": {"a": 1}}, {"name": "sub", "p": {"b": "x", "c": None}}]
TEMPLATE = (
    "{{ tools }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] or '' }}{{ m.tool_calls or '' }}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


# What looks like a number, a date or a missing value is text, and an empty cell is an empty text.
RECORDS = {
    "text": [{"text": 'a "quoted", \n line é'}, {"text": "2020-01-01"}, {"text": "NA"}, {"text": "007"}, {"text": ""}],
    "prompt and completion": [{"prompt": "1", "completion": "01"}, {"prompt": "é\r\n", "completion": "null"}],
    "messages": [{"messages": said("why\n", "é 'yes'"), "id": 1}, {"messages": said("a", "b", "c", "d"), "id": 2}],
    "tools": [
        {"messages": said("a", "b"), "tools": json.dumps(TOOLS)},
        {"messages": said("a", "b"), "tools": json.dumps(TOOLS[:1])},
    ],
}


def lines(records: list) -> bytes:
    return "\n\n".join(json.dumps(each, ensure_ascii=False) for each in records).encode()


def packed(content: bytes) -> bytes:
    return gzip.compress(content, mtime=0)  # else tests have other names each time they are collected


def zstd(content: bytes) -> bytes:
    return pa.compress(content, codec="zstd", asbytes=True)


def table(delimiter: str) -> Callable[[list], bytes]:
    def write(records: list) -> bytes:
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, records[0], delimiter=delimiter)
        writer.writeheader()
        for record in records:  # a table of text has no lists
            writer.writerow({k: v if isinstance(v, str) else json.dumps(v) for k, v in record.items()})
        return text.getvalue().encode()

    return write


def arrow(make: Callable) -> Callable[[list], bytes]:
    def write(records: list) -> bytes:
        sink, rows = io.BytesIO(), pa.Table.from_pylist(records)
        make(sink, rows)
        return sink.getvalue()

    return write


def ipc(opened: Callable) -> Callable:
    def make(sink: io.BytesIO, rows: pa.Table) -> None:
        with opened(sink, rows.schema) as writer:
            writer.write_table(rows, max_chunksize=1)

    return make


FILES: dict[str, Callable[[list], bytes]] = {
    "with a mark.jsonl": lambda records: b"\xef\xbb\xbf" + lines(records),
    "data.jsonl.gz": lambda records: packed(lines(records)),
    "data.jsonl.xz": lambda records: lzma.compress(lines(records)),
    "data.jsonl.zst": lambda records: zstd(lines(records)),
    "array.json": lambda records: b"\xef\xbb\xbf" + json.dumps(records, indent=1).encode(),
    "data.csv": lambda records: b"\xef\xbb\xbf" + table(",")(records),
    "data's é.TSV": table("\t"),
    "data.parquet": arrow(lambda sink, rows: pa.parquet.write_table(rows, sink, row_group_size=1)),
    "file.arrow": arrow(ipc(pa.ipc.new_file)),
    "stream.arrow": arrow(ipc(pa.ipc.new_stream)),
}


@pytest.fixture(scope="module")
def encoder():
    return TextEncoder.of(make_tokenizer(TEMPLATE))


@pytest.fixture(scope="module")
def wanted(tmp_path_factory, encoder):
    folder = tmp_path_factory.mktemp("wanted")
    return {
        form: samples_of(tokenize_file(write_lines(folder / "data.jsonl", *records), encoder))
        for form, records in RECORDS.items()
    }


@pytest.mark.parametrize("name", FILES)
def test_every_form_in_every_file(tmp_path, encoder, wanted, name):
    for form, records in RECORDS.items():
        (tmp_path / name).write_bytes(FILES[name](records))
        source = open_source(str(tmp_path / name))
        tokenize_source(source, encoder, tmp_path / "out.npz")
        assert samples_of(TokenizedDataset.load(tmp_path / "out.npz")) == wanted[form], form
        assert {record.form for record in source} == {"messages" if form == "tools" else form}
        assert [where for where, *_ in source.rows()] == [record.where for record in source]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("data.csv", b"", "is empty; it needs at least one record"),
        ("data.csv", b"text,n\na,1\nb\n", "row 1: the header has 2 columns and this row 1 cells; is a quotation"),
        ("data.csv", b'text\na\n"b', "cannot be read as CSV after row 0: unexpected end of data"),
        ("data.csv", b"text\n\xff\n", "cannot be read as CSV: .*can't decode byte 0xff"),
        ("data.csv", b"text,text\na,b\n", "has the column 'text' 2 times; rename all but one"),
        ("data.parquet", b"PAR1\0\0\0\0PAR1", "cannot be read as Parquet: "),
        ("data.parquet", FILES["data.parquet"]([{"text": "a"}, {"text": None}]), r"row 1: needs.* 'text' \(null\)"),
        ("data.parquet.gz", packed(b"PAR1"), "is a packed Parquet file, which can't be read in parts; unpack"),
        ("data.jsonl.gz", packed(b'{"text": "a"}' * 99)[:-9], "cannot be read: "),
        ("data.jsonl.gz", packed(b'{"text": "a"}\n{"txt": "b"}'), r"line 2: needs 'text'.*it has 'txt'"),
        ("data.jsonl.zst", zstd(b"x" * 999)[:-4], "cannot be read: "),
        ("data.json", b'[{"text": "a"}', "not valid JSON.*that begins with '\\[' must be one JSON array; or write"),
        ("data.json", b'[{"text": "a"}, ["b"]]', r"row 1: a list, not an object with 'text'"),
        ("data.json", b"[" * 100_000, "not valid JSON in UTF-8: maximum recursion depth"),
        ("data.jsonl", '{"text": "a"}'.encode("utf-16"), "line 1: not valid JSON.* can't decode byte 0xff"),
        ("data.jsonl", b"\n  \r\n", "is empty; it needs at least one record"),
        ("data.npz", b"PK\x03\x04\xff\0", "is no text: give JSON lines, JSON, CSV, Parquet or Arrow"),
        ("data.jsonl:test", None, "is one file without splits; leave out ':test'"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, capfd, name, content, message):
    if content is None:
        write_lines(tmp_path / name.partition(":")[0], {"text": "a"})
    else:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=f"(?s){name.partition(':')[0]}.*{message}") as caught:
        tokenize_source(open_source(str(tmp_path / name)), CHARACTERS, tmp_path / "out.npz")
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


@pytest.mark.timeout(LONG_S)
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
    with pytest.raises(DataError, match=r"a.*b' cannot be read: a name can't have a NUL"):
        tokenize_file("a\0b", CHARACTERS)
    for name in ("pipe", "pipe.parquet", "pipe.csv"):  # a writer would be waited for
        os.mkfifo(name)
        with pytest.raises(DataError, match=f"{name} cannot be read: it is not a regular file"):
            open_source(name)


# --- folders ------------------------------------------------------------------------------------------------

SHARD = "data/test-00000-of-00001.parquet"


@pytest.mark.parametrize(
    ("files", "splits"),
    [
        (("b/2.jsonl", "a.json", "b/1.jsonl.gz"), {None: ["a.json", "b/1.jsonl.gz", "b/2.jsonl"]}),
        (
            ("data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet", SHARD),
            {None: ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"], "test": [SHARD]},
        ),
        (("train.csv", "test.parquet"), {"train": ["train.csv"], "test": ["test.parquet"]}),
    ],
)
def test_folder(tmp_path, monkeypatch, files, splits):
    monkeypatch.chdir(tmp_path)
    folder = Path("a [b] *")
    writers = {Path(name).suffix: write for name, write in FILES.items()} | {".jsonl": lines}
    for name in ("README.md", ".hidden.jsonl", ".cache/x.jsonl", "dataset_infos.json", "config.json", "notes.txt"):
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_text("no data")
    for name in files:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(writers[Path(name).suffix]([{"text": name}, {"text": "and"}]))
    for split, wanted in splits.items():
        source = open_source(str(folder) if split is None else f"{folder}:{split}")
        records = list(source)
        assert [record.completion for record in records] == [text for each in wanted for text in (each, "and")]
        assert records[-1].where.startswith(f"{folder}/{wanted[-1]}, ")


@pytest.mark.parametrize(
    ("files", "split", "message"),
    [
        (("a.jsonl", "b.parquet", "c.jsonl"), "", r"mixes JSON \(a\.jsonl\) and Parquet \(b\.parquet\); keep files of"),
        ((), "", r"holds no data; give a folder with files of \.jsonl, "),
        (
            ("train.csv",),
            ":test",
            "has no split 'test', as names of files say; .* give one of .*:train \\(train.csv\\)",
        ),
    ],
)
def test_folder_that_is_refused(tmp_path, files, split, message):
    for name in files:
        (tmp_path / name).write_text("text\na\n")
    with pytest.raises(DataError, match=message):
        open_source(f"{tmp_path}{split}")


def test_what_needs_no_library(tmp_path):
    """JSON and CSV, packed by what Python has; all else names the library in one line."""
    own = ["with a mark.jsonl", "data.jsonl.gz", "array.json", "data.csv"]
    others = ["data.parquet", "file.arrow", "data.jsonl.zst"]
    for name in own + others:
        (tmp_path / name).write_bytes(FILES[name](RECORDS["text"]))
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "state.json").touch()
    program = (
        "import sys\nfor name in ('datasets', 'pyarrow', 'pandas'): sys.modules[name] = None\n"
        "from odc_triton.jobs.data.sources import open_source\n"
        "for name in sys.argv[1:]:\n"
        "    try: print(len(list(open_source(name))))\n"
        "    except ValueError as error: print(error)\n"
    )
    names = [*own, *others, ".", "saved:test", "owner/name:train"]
    done = subprocess.run(
        [sys.executable, "-c", program, *names],
        cwd=tmp_path, env=os.environ | {"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    said = done.stdout.splitlines()
    assert said[: len(own)] == ["5"] * len(own)
    for name, line in zip(names[len(own) :], said[len(own) :], strict=True):
        assert line.startswith(name.partition(":")[0])
        assert line.endswith('that needs the `datasets` library: pip install "odc-triton[data]"')
