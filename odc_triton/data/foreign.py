"""Data in other well-known formats: shell commands to paste that convert them to what is read here."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

_UNPACK = {
    b"\x1f\x8b": ("gzip", "gzip -dc"),
    b"\x28\xb5\x2f\xfd": ("zstd", "zstd -dc"),
    b"BZh": ("bzip2", "bzip2 -dc"),
    b"\xfd7zXZ": ("xz", "xz -dc"),
}
# By the fields that identify a format: its name, and an expression that converts its record `r`.
_RECORDS = {
    ("conversations",): (
        "ShareGPT's form",
        '{"messages": [{"role": "system", "content": r["system"]}] * bool(r.get("system")) + '
        '[{"role": {"human": "user", "gpt": "assistant"}.get(m["from"], m["from"]), "content": m["value"]} '
        'for m in r["conversations"]]}',
    ),
    ("instruction", "output"): (
        "Alpaca's form",
        '{"prompt": r["instruction"] + ("\\n\\n" + r["input"] if r.get("input") else ""), "completion": r["output"]}',
    ),
}


def of_file(raw: bytes, file: str) -> str | None:
    """What `file` is instead of JSON lines, judged by its line `raw`, and the remedy; None if unknown."""
    for magic, (name, unpack) in _UNPACK.items():
        if raw.startswith(magic):
            return f"the file is compressed with {name}; unpack it: {unpack} {shlex.quote(file)} > {_made_of(file)}"
    if raw.startswith(b"PK\x03\x04"):
        return "the file is a zip archive, as .npz files are; give the JSON lines that it holds or was made from"
    if raw.startswith(b"PAR1"):
        return f"the file is Parquet; convert it to JSON lines: {of_parquet(file)}"
    if Path(file).suffix.lower() in (".csv", ".tsv"):
        delimiter = "\\t" if Path(file).suffix.lower() == ".tsv" else ","
        rows = f'csv.DictReader(open({_literal(file)}, encoding="utf-8-sig", newline=""), delimiter="{delimiter}")'
        return f"the file is a table, not JSON; convert it to JSON lines: {_printing('csv', 'r', rows, file)}"
    return None


def of_parquet(place: str) -> str:
    """The command for a Parquet file, or a folder of them."""
    files = (
        f'sorted(glob.glob({_literal(place)} + "/**/*.parquet", recursive=True))'
        if Path(place).is_dir()
        else f"[{_literal(place)}]"
    )
    rows = f"(r for f in {files} for b in pyarrow.parquet.ParquetFile(f).iter_batches() for r in b.to_pylist())"
    return _printing("glob, pyarrow.parquet", "r", rows, place)


def of_array(file: str) -> str:
    return f"write each element of the JSON array on a line: jq -c '.[]' {shlex.quote(file)} > {_made_of(file)}"


def of_record(record: dict[str, Any], file: str | None) -> str | None:
    """The name of `record`'s form, and the remedy for its file, or for its table if there is no file."""
    for names, (form, fields) in _RECORDS.items():
        if record.keys() >= set(names):
            if file is None:
                return f"{form}; in Python: data.map(lambda r: {fields}).save_to_disk(FOLDER), and give that folder"
            lines = f'map(json.loads, filter(str.strip, open({_literal(file)}, encoding="utf-8-sig")))'
            return f"{form}; convert it: {_printing('json', f'r | {fields}', lines, file)}"
    return None


def _printing(modules: str, what: str, rows: str, file: str) -> str:
    program = f"import json, {modules}; [print(json.dumps({what})) for r in {rows}]"
    return f"python -c {shlex.quote(program)} > {_made_of(file)}"


def _made_of(file: str) -> str:
    """A name that hardly any file has yet, because the command overwrites it."""
    return shlex.quote(f"{file.rstrip('/')}.converted.jsonl")


def _literal(file: str) -> str:
    return json.dumps(file, ensure_ascii=False)
