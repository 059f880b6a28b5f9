"""Data of other formats: the error has a command, which is pasted here, and makes what is read."""

from __future__ import annotations

import csv
import gzip
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from odc_triton.data.records import DataError, read_records, read_rows
from odc_triton.data.sources import open_source

NAME = "my data's é"
TEXTS = [{"text": 'a "quoted", \n line é'}, {"text": "b"}]
TALK = [{"from": "human", "value": "why\n"}, {"from": "gpt", "value": "é 'yes'"}]
SHARED = [{"id": 1, "conversations": TALK, "system": "be kind"}, {"conversations": TALK[:1], "system": ""}]
ALPACA = [{"instruction": "add", "input": "1", "output": "2"}, {"instruction": "say", "input": "", "output": "é"}]
SAID = [{"role": "user", "content": "why\n"}, {"role": "assistant", "content": "é 'yes'"}]
CONVERSATIONS = [[{"role": "system", "content": "be kind"}, *SAID], SAID[:1]]
PAIRS = [("add\n\n1", "2"), ("say", "é")]


def lines(path: Path, records: list) -> None:
    path.write_text("\n\n".join(json.dumps(each, ensure_ascii=False) for each in records), encoding="utf-8")


def table(path: Path, records: list) -> None:
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, records[0], delimiter="\t" if path.suffix == ".tsv" else ",")
        writer.writeheader()
        writer.writerows(records)


def parquet(path: Path, records: list) -> None:
    arrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(arrow.Table.from_pylist(records), path)


def folder(path: Path, records: list) -> None:
    (path / "data").mkdir(parents=True)
    (path / "README.md").touch()
    parquet(path / "data" / "0.parquet", records[:1])
    parquet(path / "data" / "1.parquet", records[1:])


def packed(path: Path, records: list) -> None:
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, records)).encode()))


def array(path: Path, records: list) -> None:
    path.write_text(json.dumps(records, indent=1), encoding="utf-8")


@pytest.mark.parametrize(
    ("suffix", "write", "records", "said", "wanted"),
    [
        (".jsonl", lines, SHARED, "line 1: needs 'text'.*'system', ShareGPT's form; convert it", CONVERSATIONS),
        (".jsonl", lines, ALPACA, "line 1: needs 'text'.*, Alpaca's form; convert it", PAIRS),
        (".csv", table, TEXTS, "line 1: the file is a table, not JSON", TEXTS),
        (".tsv", table, TEXTS, "line 1: the file is a table, not JSON", TEXTS),
        (".parquet", parquet, TEXTS, "line 1: the file is Parquet", TEXTS),
        ("", folder, TEXTS, "holds Parquet files, not a data set of `save_to_disk`", TEXTS),
        (".jsonl.gz", packed, TEXTS, "line 1: the file is compressed with gzip; unpack it: gzip -dc", TEXTS),
        (".json", array, TEXTS, "line 1: not valid JSON.*write each element of the JSON array on a line", TEXTS),
    ],
)  # fmt: skip
def test_the_remedy_works_as_it_is_pasted(tmp_path, suffix, write, records, said, wanted):
    write(tmp_path / (NAME + suffix), records)
    with pytest.raises(DataError, match=f"(?s){NAME}{suffix}.*{said}") as caught:
        list(open_source(str(tmp_path / (NAME + suffix))))
    command = re.search(r"(python -c|gzip|jq) .*", str(caught.value)).group()
    if shutil.which(command.split()[0]) is None and not command.startswith("python"):
        pytest.skip(f"{command.split()[0]} is not installed")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    subprocess.run(command, shell=True, check=True, executable="/bin/bash", env=os.environ | {"PATH": path})
    made = list(read_records(tmp_path / f"{NAME}{suffix}.converted.jsonl"))
    if wanted is TEXTS:
        assert [{"text": each.completion} for each in made] == TEXTS
    else:
        assert [each.messages or (each.prompt, each.completion) for each in made] == wanted


@pytest.mark.parametrize(("records", "wanted"), [(SHARED, CONVERSATIONS), (ALPACA, PAIRS)])
def test_the_remedy_of_a_table_is_a_line_of_python(records, wanted):
    with pytest.raises(DataError, match="rows, row 0: needs 'text'") as caught:
        list(read_rows(records, "rows"))
    made = eval(re.search(r"data.map\((.*)\)\.save_to_disk", str(caught.value))[1])
    rows = read_rows([each | made(each) for each in records], "rows")
    assert [each.messages or (each.prompt, each.completion) for each in rows] == wanted


def test_a_prepared_file_is_no_record(tmp_path):
    (tmp_path / "data.npz").write_bytes(b"PK\x03\x04\xff")
    with pytest.raises(DataError, match=r"data\.npz, line 1: the file is a zip archive, as \.npz files are; give the"):
        list(open_source(str(tmp_path / "data.npz")))
