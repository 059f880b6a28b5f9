"""The same records in every kind of file, and in folders of files: the same samples, or an error that says what."""

from __future__ import annotations

import bz2
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

from odc_triton.data.dataset import TokenizedDataset, tokenize_file, tokenize_source
from odc_triton.data.prepared import prepare_data
from odc_triton.data.records import DataError
from odc_triton.data.sources import File, open_source
from odc_triton.data.tokenizer import TextEncoder
from tests.support.chats import make_tokenizer
from tests.support.records import CHARACTERS, ENCODER, NEVER, samples_of, write_lines

TOOLS = [{"name": "add", "p": {"a": 1}}, {"name": "sub", "p": {"b": "x", "c": None}}]
TEMPLATE = (
    "{{ tools }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] or '' }}{{ m.tool_calls or '' }}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def talk(*words: str) -> list[dict]:
    return [{"from": ("human", "gpt")[at % 2], "value": word} for at, word in enumerate(words)]


def said(*words: str) -> list[dict]:
    return [{"role": ("user", "assistant")[at % 2], "content": word} for at, word in enumerate(words)]


# What looks like a number, a date or a missing value is text.
RECORDS = {
    "text": [{"text": 'a "quoted", \n line é'}, {"text": "2020-01-01"}, {"text": "NA"}, {"text": "007"}],
    "prompt and completion": [{"prompt": "1", "completion": "01"}, {"prompt": "é\r\n", "completion": "null"}],
    "Alpaca": [
        {"instruction": "add", "input": "1", "output": "2020-01-01"},
        {"instruction": "say", "input": "", "output": "3"},
    ],
    "messages": [{"messages": said("why\n", "é 'yes'"), "id": 1}, {"messages": said("a", "b", "c", "d"), "id": 2}],
    "conversations": [
        {"conversations": talk("why", "yes"), "system": "be kind"},
        {"conversations": talk("why", "no"), "system": ""},
    ],
    "prompt and completion as messages": [
        {"prompt": said("a", "b", "c"), "completion": said("c", "d")[1:]},
        {"prompt": said("a"), "completion": said("c", "d")[1:]},
    ],
    "tools": [
        {"messages": said("a", "b"), "tools": json.dumps(TOOLS)},
        {"messages": said("a", "b"), "tools": json.dumps(TOOLS[:1])},
    ],
}


def lines(records: list) -> bytes:
    return "\n\n".join(json.dumps(each, ensure_ascii=False) for each in records).encode()


def packed(content: bytes) -> bytes:
    return gzip.compress(content, mtime=0)  # else tests have other names each time they are collected


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
    "data.jsonl": lines,
    "with a mark.jsonl": lambda records: b"\xef\xbb\xbf" + lines(records),
    "data.jsonl.gz": lambda records: packed(lines(records)),
    "data.jsonl.bz2": lambda records: bz2.compress(lines(records)),
    "data.jsonl.xz": lambda records: lzma.compress(lines(records)),
    "data.jsonl.zst": lambda records: pa.compress(lines(records), codec="zstd", asbytes=True),
    "no ending": lambda records: packed(lines(records)),
    "array.json": lambda records: json.dumps(records, indent=1).encode(),
    "array in a line.json": lambda records: b"\n [" + b" , ".join(json.dumps(r).encode() for r in records) + b"]",
    "array.json.gz": lambda records: packed(json.dumps(records).encode()),
    "data.csv": table(","),
    "data's é.TSV": table("\t"),
    "data.csv.gz": lambda records: packed(table(",")(records)),
    "data.parquet": arrow(lambda sink, rows: pa.parquet.write_table(rows, sink, row_group_size=1)),
    "parquet of no ending": arrow(lambda sink, rows: pa.parquet.write_table(rows, sink)),
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
    # A prompt that is written as text is text.
    forms = [form for form in RECORDS if not (form == "prompt and completion as messages" and "sv" in name.lower())]
    for form in forms:
        records = RECORDS[form]
        (tmp_path / name).write_bytes(FILES[name](records))
        source, ends = open_source(str(tmp_path / name)), []
        tokenize_source(source, encoder, tmp_path / "out.npz", progress=lambda *at, ends=ends: ends.append(at))
        assert samples_of(TokenizedDataset.load(tmp_path / "out.npz")) == wanted[form], form
        assert 0 < ends[-1][1] <= 1
        assert {record.form for record in source} == {"messages" if form == "tools" else form}
        assert [where for where, _ in source.rows()] == [record.where for record in source]


def test_one_document_over_several_lines(tmp_path):
    path = tmp_path / "one.json"
    path.write_text(json.dumps({"prompt": "a", "completion": "b"}, indent=2))
    assert [(record.prompt, record.completion) for record in File(path)] == [("a", "b")]
    path.write_text(json.dumps({"prompt": "a", "completion": "b"}, indent=2) + "\n{}")
    with pytest.raises(DataError, match=r"one\.json, line 1: not valid JSON.*every line must hold one whole JSON"):
        list(File(path))


def test_json_lines_keep_what_a_table_has_no_place_for(tmp_path):
    """Nulls in arguments, and other fields in each record: an array and packed lines are no tables either."""
    records = [
        {"messages": [*said("a"), {"role": "assistant", "tool_calls": [{"function": {"arguments": each}}]}]}
        for each in ({"a": 1, "b": None}, {"a": "x"})
    ]
    for name in ("data.jsonl", "data.jsonl.zst", "array.json"):
        (tmp_path / name).write_bytes(FILES[name](records))
        found = [record.messages for record in open_source(str(tmp_path / name))]
        assert found == [record["messages"] for record in records]


def test_what_datasets_writes_as_json_is_read_as_objects(tmp_path):
    import datasets

    features = datasets.Features(
        {
            "messages": datasets.List({"role": datasets.Value("string"), "content": datasets.Value("string")}),
            "tools": datasets.List(datasets.Json()),
        }
    )
    rows = [{"messages": said("a", "b"), "tools": TOOLS}]
    datasets.Dataset.from_dict({k: [row[k] for row in rows] for k in rows[0]}, features=features).to_parquet(
        tmp_path / "data.parquet"
    )
    (record,) = open_source(str(tmp_path / "data.parquet"))
    assert record.tools == [TOOLS[0], {"name": "sub", "p": {"b": "x"}}]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("data.csv", b"", "cannot be read as CSV: Empty CSV file"),
        ("data.csv", b"text,n\na,1\nb\n", "cannot be read as CSV: .*Expected 2 columns, got 1"),
        ("data.csv", b"text\n\xff\n", "cannot be read as CSV: .*invalid UTF8"),
        ("data.csv", b"text\n", "has no rows; it needs at least one"),
        ("data.csv", b"text,text\na,b\n", "has the column 'text' 2 times; rename all but one"),
        ("data.csv", b"words\na\n", r"row 0: needs 'text'.*it has 'words'"),
        ("data.parquet", b"PAR1\0\0\0\0PAR1", "cannot be read as Parquet: "),
        ("data.arrow", b"\xff\xff\xff\xff\x10", "cannot be read as Arrow: "),
        ("data.parquet", FILES["data.parquet"]([{"text": 3}]), "row 0: 'text' must be a string, not a number"),
        ("data.parquet.gz", packed(b"PAR1"), "is a packed Parquet file, which can't be read in parts; unpack"),
        ("data.jsonl.gz", packed(b'{"text": "a"}' * 99)[:-9], "cannot be read: "),
        ("data.jsonl.gz", packed(b'{"text": "a"}\n{"txt": "b"}'), r"line 2: needs 'text'.*it has 'txt'"),
        ("data.jsonl.zst", pa.compress(b"x" * 999, codec="zstd", asbytes=True)[:-4], "cannot be read: "),
        ("data.jsonl.xz", lzma.compress(b"x" * 999)[:40] + b"\0" * 40, "cannot be read: "),
        ("data.json", b'[{"text": "a"}', "not valid JSON: .*that begins with '\\[' must be one JSON array; or write"),
        ("data.json", b'[{"text": "a"}, ["b"]]', r"row 1: a list, not an object with 'text'"),
        ("data.json", b"[]", "is empty; it needs at least one"),
        ("data.json", b"[" * 100_000, "nested too deeply"),
        ("data.npz", b"PK\x03\x04\xff", "is a zip archive, as .npz files are; give the files that it holds"),
        ("data.jsonl:test", None, "is one file without splits; leave out ':test'"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, name, content, message):
    if content is None:
        write_lines(tmp_path / name.partition(":")[0], {"text": "a"})
    else:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=f"(?s){name.partition(':')[0]}.*{message}") as caught:
        tokenize_source(open_source(str(tmp_path / name)), CHARACTERS, tmp_path / "out.npz")
    assert "\n" not in str(caught.value)


# --- folders ------------------------------------------------------------------------------------------------


def texts(name: str) -> list[str]:
    return [record.completion for record in open_source(name)]


@pytest.mark.parametrize(
    ("files", "splits"),
    [
        (("b/2.jsonl", "a.json", "b/1.jsonl.gz"), {None: ["a.json", "b/1.jsonl.gz", "b/2.jsonl"]}),
        (
            ("data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet", "data/test-0.parquet"),
            {
                None: ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"],
                "train": ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"],
                "test": ["data/test-0.parquet"],
            },
        ),
        (("all.csv", "dev.csv", "eval/x.csv"), {None: ["all.csv"], "validation": ["dev.csv"], "test": ["eval/x.csv"]}),
        (("trainer.jsonl", "contest.jsonl"), {None: ["contest.jsonl", "trainer.jsonl"]}),
        (("train.csv", "test.parquet"), {"train": ["train.csv"], "test": ["test.parquet"]}),
        (("x.arrow", "y.arrow"), {"train": ["x.arrow", "y.arrow"]}),
    ],
)
def test_folder(tmp_path, files, splits):
    writers = {".jsonl": lines, ".gz": FILES["data.jsonl.gz"], ".json": FILES["array.json"], ".csv": table(","),
               ".parquet": FILES["data.parquet"], ".arrow": FILES["file.arrow"]}  # fmt: skip
    for name in ("README.md", ".hidden.jsonl", ".cache/x.jsonl", "dataset_infos.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("no data")
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(writers[Path(name).suffix]([{"text": name}, {"text": "and"}]))
    for split, wanted in splits.items():
        name = str(tmp_path) if split is None else f"{tmp_path}:{split}"
        assert texts(name) == [text for each in wanted for text in (each, "and")]
        source = open_source(name)
        assert 0 < list(source)[-1].end <= source.total() == sum((tmp_path / each).stat().st_size for each in wanted)
        assert len(list(source.rows())) == 2 * len(wanted)


@pytest.mark.parametrize(
    ("files", "split", "message"),
    [
        (("a.jsonl", "b.parquet", "c.jsonl"), "", r"mixes JSON \(a\.jsonl\) and Parquet \(b\.parquet\); keep files of"),
        (("a.csv", "b.tsv"), "", r"mixes CSV \(a\.csv\) and TSV \(b\.tsv\)"),
        (("README.md",), "", r"holds no data; give a folder with files of \.jsonl, "),
        (("train.csv",), ":test", "has no files of the split 'test'; give one of .*:train"),
        (("test.csv",), "", "has no files of the split 'train'; give one of .*:test"),
    ],
)
def test_folder_that_is_refused(tmp_path, files, split, message):
    for name in files:
        (tmp_path / name).write_text("text\na\n")
    with pytest.raises(DataError, match=message):
        open_source(f"{tmp_path}{split}")


def test_prepared_samples_are_those_of_the_files(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("a", "b"):
        write_lines(folder / f"{name}.jsonl", {"text": name})
    assert len(prepare_data(str(folder), ENCODER, folder=tmp_path / "kept")) == 2
    assert len(prepare_data(str(folder), NEVER, folder=tmp_path / "kept")) == 2
    before = (folder / "b.jsonl").stat()
    (folder / "b.jsonl").write_text('{"text": "c"}\n')
    os.utime(folder / "b.jsonl", ns=(before.st_atime_ns, before.st_mtime_ns))
    again = prepare_data(str(folder), ENCODER, folder=tmp_path / "kept")
    assert samples_of(again)[1][0] == [2, ord("c"), 1]
    write_lines(folder / "c.jsonl", {"text": "d"})
    assert len(prepare_data(str(folder), ENCODER, folder=tmp_path / "kept")) == 3


def test_json_needs_no_library(tmp_path):
    """Lines, an array, packed by what Python has; all else names the library in one line."""
    for name in ("data.jsonl", "data.jsonl.gz", "array.json"):
        (tmp_path / name).write_bytes(FILES[name](RECORDS["text"]))
    for name in ("data.csv", "data.parquet", "file.arrow", "data.jsonl.zst"):
        (tmp_path / name).write_bytes(FILES[name](RECORDS["text"]))
    program = (
        "import sys\nfor name in ('datasets', 'pyarrow', 'pandas'): sys.modules[name] = None\n"
        "from odc_triton.data.sources import open_source\n"
        "for name in sys.argv[1:]:\n"
        "    try: print(len(list(open_source(name))))\n"
        "    except ValueError as error: print(error)\n"
    )
    names = ["data.jsonl", "data.jsonl.gz", "array.json", "data.csv", "data.parquet", "file.arrow", "data.jsonl.zst"]
    command = [sys.executable, "-c", program, *names]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    said = done.stdout.splitlines()
    assert said[:3] == ["4"] * 3
    for name, line in zip(names[3:], said[3:], strict=True):
        assert line.startswith(name)
        assert line.endswith('that needs the `datasets` library with its pyarrow: pip install "odc-triton[data]"')
