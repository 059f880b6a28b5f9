"""Training records: the lines of a JSON-lines file, or the rows of a table, each one checked.

A record holds one of three forms; other fields are ignored:

    {"text": …}                          all of it is learned
    {"prompt": …, "completion": …}       the completion is learned
    {"messages": [{"role": …, "content": …}, …]}     the assistant's messages are learned

Next to `messages` there may be `tools`, and the assistant may call them: its message has `tool_calls`, and its
`content` may be null.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from . import foreign

IGNORED = -100  # the label that torch's and transformers' losses ignore
Form = Literal["text", "prompt and completion", "messages"]
FORMS = "'text', or both 'prompt' and 'completion', or 'messages'"
# While a line is tokenised it takes about a hundred times its size in memory.
LARGEST_LINE_BYTES = 16 * 2**20
_FOREIGN_ROLES = {"human": "user", "gpt": "assistant"}  # names that no chat template knows


class DataError(ValueError):
    """Training data that cannot be used; the message names the file, the line if there is one, and the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One record. For a text `prompt` is None and `completion` is the whole text. `messages` is None unless the
    record is a conversation; then `prompt` is None, `completion` is empty, and there may be `tools`."""

    prompt: str | None = None
    completion: str = ""
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    line: int  # of the file, from 1; or row of the table, from 0
    where: str  # how errors name it
    end: int  # where it ends in its source: in bytes of a file, in rows of a table
    characters: int  # in all its texts

    @property
    def form(self) -> Form:
        if self.messages is not None:
            return "messages"
        return "text" if self.prompt is None else "prompt and completion"


def read_records(path: str | os.PathLike) -> Iterator[Record]:
    """The records of a JSON-lines file (UTF-8; blank lines are skipped), one at a time.

    Raises DataError with file and line for one that is not usable, and for a file without any.
    """
    name = os.fspath(path)
    for number, where, value, end in read_lines(path):
        yield _record(where, value, line=number, end=end, file=name)


def read_lines(path: str | os.PathLike) -> Iterator[tuple[int, str, Any, int]]:
    """(number from 1, how errors name it, JSON value, byte where it ends) of each line that is not blank.

    Raises DataError as `read_records` does.
    """
    end, empty = 0, True
    try:
        # A pipe would block here forever, and could not be read twice.
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise DataError(f"{path} cannot be read: it is not a regular file")
        with open(path, "rb") as file:
            lines = iter(lambda: file.readline(LARGEST_LINE_BYTES + 1), b"")
            for number, raw in enumerate(lines, start=1):
                where = f"{path}, line {number}"
                if len(raw) > LARGEST_LINE_BYTES:
                    raise DataError(f"{where}: {_too_large(raw, path)}")
                end += len(raw)
                if raw.strip():
                    empty = False
                    yield number, where, _parse(where, raw, os.fspath(path)), end
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path!r} cannot be read: {error}") from error  # a NUL in the path
    if empty:
        raise DataError(f"{path} is empty; it needs at least one JSON object, each on its own line")


def parse_record(where: str, raw: bytes, *, line: int = 0) -> Record:
    """The record of one line. `where`: how errors name it. Raises DataError."""
    return _record(where, _parse(where, raw, "FILE"), line=line, end=len(raw), file="FILE")


def read_rows(rows: Iterable[Any], name: str) -> Iterator[Record]:
    """The records of a table, whose rows are dicts. A field that is None counts as missing, because a table has
    all fields in all rows.

    Raises DataError with the table's name and the row for one that is not usable, and for a table without rows.
    """
    row = -1
    for row, fields in enumerate(rows):
        where = f"{name}, row {row}"
        if isinstance(fields, dict):
            nested = ("messages", "tools")  # structs in one column have each other's fields too
            fields = {
                key: _without_none(value) if key in nested else value
                for key, value in fields.items()
                if value is not None
            }
        yield _record(where, fields, line=row, end=row + 1)
    if row < 0:
        raise DataError(f"{name} has no rows; it needs at least one")


def message_text(message: dict[str, Any]) -> str:
    """What a message says, for counting: its content, and its tool calls as JSON."""
    calls = message.get("tool_calls")
    return message.get("content", "") + (json.dumps(calls, ensure_ascii=False) if calls else "")


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(each) for key, each in value.items() if each is not None}
    return [_without_none(each) for each in value] if isinstance(value, list) else value


def _too_large(raw: bytes, path: str | os.PathLike) -> str:
    remedy = (
        foreign.of_array(os.fspath(path)) if raw.lstrip().startswith(b"[") else "split its text into several records"
    )
    return f"longer than {LARGEST_LINE_BYTES // 2**20} MiB, the limit for one record; {remedy}"


def _parse(where: str, raw: bytes, file: str) -> Any:
    """`file`: how commands name it."""
    try:
        # utf-8-sig: Windows editors put a byte order mark at the start.
        return json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        if what := foreign.of_file(raw, file):
            raise DataError(f"{where}: {what}") from error
        byte = error.object[error.start]
        raise DataError(
            f"{where}: not UTF-8 (byte 0x{byte:02x} at {error.start}); convert the file to UTF-8"
        ) from error
    except RecursionError as error:
        raise DataError(f"{where}: not usable JSON: nested too deeply") from error
    except ValueError as error:
        if what := foreign.of_file(raw, file):
            raise DataError(f"{where}: {what}") from error
        is_array = raw.lstrip().startswith(b"[")
        remedy = foreign.of_array(file) if is_array else "every line must hold one whole JSON object"
        raise DataError(f"{where}: not valid JSON: {error}; {remedy}") from error


def _record(where: str, record: Any, *, line: int, end: int, file: str | None = None) -> Record:
    if not isinstance(record, dict):
        remedy = f"; {foreign.of_array(file or 'FILE')}" if isinstance(record, list) else ""
        raise DataError(f"{where}: a {type(record).__name__}, not a JSON object with {FORMS}{remedy}")
    pair = [name for name in ("prompt", "completion") if name in record]
    # A lone prompt next to messages repeats their first one, as in several well-known data sets.
    given = [name for name in ("text", "messages") if name in record] + (pair if len(pair) == 2 else [])
    if "text" in record and pair:
        given = ["text", *pair]
    if len(given) > 1 and given != pair:
        others = " and ".join(map(repr, given[1:]))
        raise DataError(f"{where}: has {given[0]!r} and also {others}; keep one form")
    if not given:
        what = foreign.of_record(record, file)
        raise DataError(f"{where}: needs {FORMS}; it has {_names(record)}" + (f", {what}" if what else ""))
    place = {"line": line, "where": where, "end": end}
    if given == ["messages"]:
        messages = _messages(where, record)
        characters = sum(len(message_text(each)) for each in messages)
        return Record(messages=messages, tools=_tools(where, record), characters=characters, **place)
    texts = [_string(where, record, name) for name in given]
    return Record(
        prompt=texts[0] if len(texts) == 2 else None,
        completion=texts[-1],
        characters=sum(map(len, texts)),
        **place,
    )


def _messages(where: str, record: dict) -> list[dict[str, Any]]:
    messages = record["messages"]
    if not isinstance(messages, list) or not messages:
        what = "an empty list" if messages == [] else f"a {type(messages).__name__}"
        raise DataError(f"{where}: 'messages' must be a list of at least one message, not {what}")
    checked = []
    for number, message in enumerate(messages):
        here = f"{where}: message {number}"
        if not isinstance(message, dict):
            raise DataError(f"{here} is a {type(message).__name__}, not an object with 'role' and 'content'")
        calls = message.get("role") == "assistant" and message.get("tool_calls")
        for name in ("role", "content"):
            if message.get(name) is None:
                if name == "content" and calls:
                    continue
                remedy = "; rename 'from' and 'value'" if {"from", "value"} <= message.keys() else ""
                raise DataError(f"{here} needs 'role' and 'content'; it has {_names(message)}{remedy}")
            _string(here, message, name)
        if message["role"] in _FOREIGN_ROLES:
            raise DataError(f"{here} has the role {message['role']!r}; call it {_FOREIGN_ROLES[message['role']]!r}")
        # The template may use other fields: reasoning, tool calls, a name.
        _check_others(here, message)
        checked.append({name: value for name, value in message.items() if value is not None})
        if calls:
            checked[-1]["tool_calls"] = _with_objects(calls)
    return checked


def _with_objects(calls: Any) -> Any:
    """Calls whose `arguments` are objects, as templates want them; OpenAI's format has a string of JSON."""
    if isinstance(calls, list):
        return [_with_objects(each) for each in calls]
    if not isinstance(calls, dict):
        return calls
    calls = {name: _with_objects(value) if name == "function" else value for name, value in calls.items()}
    if isinstance(calls.get("arguments"), str):
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(arguments := json.loads(calls["arguments"]), dict):
                calls["arguments"] = arguments
    return calls


def _tools(where: str, record: dict) -> list[dict[str, Any]] | None:
    tools = record.get("tools")
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list) or not all(isinstance(each, dict) for each in tools):
        raise DataError(
            f"{where}: 'tools' must be a list of objects, the functions' JSON schemas, not {ascii(tools)[:60]}"
        )
    _check_json(f"{where}: 'tools'", tools)
    return tools


def _check_others(here: str, message: dict) -> None:
    if not message.keys() <= {"role", "content"}:
        _check_json(f"{here} has another field than 'role' and 'content' that", message)


def _check_json(what: str, value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        reason = str(error).encode("ascii", "backslashreplace").decode()
        raise DataError(f"{what} is not JSON: {reason}; leave it out") from error


def _string(where: str, record: dict, name: str) -> str:
    value = record[name]
    if not isinstance(value, str):
        raise DataError(f"{where}: {name!r} must be a string, not a {type(value).__name__}")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{where}: {name!r} has half a surrogate pair at character {error.start}; "
                "write the whole pair, or leave the character out"
            ) from error
    return value


def _names(record: dict) -> str:
    shown = [ascii(str(name)[:40]) for name in islice(record, 8)]
    more = len(record) - len(shown)
    return (", ".join(shown) or "no field") + (f" and {more} more" if more else "")
