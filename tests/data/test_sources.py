"""Tables in memory, saved data sets and those of the hub, by the library `datasets`."""

from __future__ import annotations

import hashlib

import datasets
import pytest

from odc_triton.jobs.data import sources
from odc_triton.jobs.data.prepared import prepare_data
from odc_triton.jobs.data.records import DataError
from odc_triton.jobs.data.sources import RecordRows, open_source
from tests.support.records import ENCODER, NEVER, samples_of

ROWS = [
    {"text": "ab", "prompt": None, "completion": None, "messages": None},
    {"text": None, "prompt": "a", "completion": "xy", "messages": None},
    {"text": None, "prompt": None, "completion": None, "messages": [{"role": "user", "content": "a", "name": None}]},
]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "rows is empty; it needs at least one record"),
        ([{3: "a", "x": 1}], "rows, row 0: needs 'text'.*it has '3', 'x'"),
        ([{"text": b"a"}], "'text' must be a string, not bytes"),
        ([{"messages": [{"role": "user", "content": "a", "at": object()}]}], "not JSON: Object of type object is not"),
    ],
)
def test_unusable_row_is_named(rows, message):
    with pytest.raises(DataError, match=message):
        list(RecordRows(rows, "rows"))


def test_fields_that_only_a_table_has_are_left_out():
    """All structs of a column have the same fields there."""
    arguments = {"a": 1, "b": None}
    calls = [{"type": "function", "function": {"name": "add", "arguments": arguments}}]
    rows = [{"messages": [{"role": "user", "content": "a", "tool_calls": None},
                          {"role": "assistant", "content": None, "tool_calls": calls}],
             "tools": [{"function": {"name": "add", "x": None}}]}]  # fmt: skip
    (record,) = RecordRows(rows, "rows")
    assert record.tools == [{"function": {"name": "add"}}]
    assert record.messages[0] == {"role": "user", "content": "a"}
    called = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert record.messages[1] == {"role": "assistant", "tool_calls": [called]}
    assert record.characters > len("add")


def made(rows):
    # Its own way to a fingerprint, Dataset.from_list, pickles pyarrow's module, which some pairs of versions can't.
    table = datasets.table.InMemoryTable.from_pylist(rows)
    return datasets.Dataset(table, fingerprint=hashlib.sha256(repr(rows).encode()).hexdigest()[:16])


def test_saved_data_set(tmp_path):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    both = datasets.DatasetDict(train=made(ROWS[:2]), test=made([{"messages": messages, "prompt": "a"}] * 3))
    both.save_to_disk(tmp_path / "both")
    both["test"].save_to_disk(tmp_path / "one")
    assert [record.form for record in open_source(str(tmp_path / "both"))] == ["text", "prompt and completion"]
    for name in (f"{tmp_path}/both:test", f"{tmp_path}/one"):
        assert [record.messages for record in open_source(name)] == [messages] * 3
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
    made(ROWS[1:2]).save_to_disk(tmp_path / "one")
    assert len(prepare_data(f"{tmp_path}/one", ENCODER, folder=kept)) == 1


def test_names_of_the_hub(monkeypatch):
    asked = []

    def load(*arguments, **options):
        asked.append((*arguments, options["split"]))
        if arguments[0] == "nobody/nothing":
            raise ConnectionError("no\nanswer")
        return made(ROWS[:1])

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(sources, "hub_problem", lambda: None)
    for name in ("owner/name", "name:test", "owner/name:small:test"):
        source = open_source(name)
        assert source.name == name
        assert [record.completion for record in source] == ["ab"]
        assert source.fingerprint() is not None
    assert asked == [("owner/name", None, "train"), ("name", None, "test"), ("owner/name", "small", "test")]
    with pytest.raises(DataError, match=r"nobody/nothing:train cannot be read as a data set: no answer$"):
        open_source("nobody/nothing:train")
    monkeypatch.setattr(sources, "hub_problem", lambda: "the hub does not answer")
    with pytest.raises(DataError, match=r"was taken for a data set on the hub, and can't be read: the hub does not an"):
        open_source("nobody/nothing:train")
