"""Training records, from any form and file, and their names in errors."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from datetime import date, time
from itertools import islice
from typing import Any, Literal

IMAGE_CHARACTERS = 40_000
Form = Literal[
    "text", "prompt and completion", "prompt and completion as messages", "messages", "conversations", "Alpaca"
]


class DataError(ValueError):
    """Training data that cannot be used; the message names the file, the line or row if there is one, the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One record. For a text `prompt` is None and `completion` is the whole text. `messages` is None unless the
    record is a conversation; then `prompt` is None, `completion` is empty, and there may be `tools` and `images`.

    A message's content is a text, or a list of {"type": "text", "text": …} and {"type": "image"}; of these each has one
    of the `images`, in order.
    """

    form: Form
    prompt: str | None = None
    completion: str = ""
    messages: list[dict[str, Any]] | None = None
    learned_from: int = 0  # the first message that may be learned
    tools: list[dict[str, Any]] | None = None
    images: tuple[str | bytes, ...] = ()  # a path, a URL, or the image as it is encoded
    folder: str | None = None  # that paths are relative to
    where: str  # its name in errors
    characters: int  # in all its texts; an image counts as `IMAGE_CHARACTERS`, so that batches hold few


def message_text(message: dict[str, Any]) -> str:
    """A message's text, for counting: its content, and its tool calls as JSON."""
    calls = message.get("tool_calls")
    return content_text(message) + (json.dumps(calls, ensure_ascii=False) if calls else "")


def content_text(message: dict[str, Any]) -> str:
    """A message's content without its images."""
    content = message.get("content", "")
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def from_json(value: Any) -> Any:
    """The value of a string of JSON; any other value unchanged."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def kind_of(value: Any) -> str:
    """The kind of a record's value, for errors."""
    kinds = (
        (bool, "true or false"),
        (str, "a string"),
        ((int, float), "a number"),
        (list, "a list"),
        (dict, "an object"),
        (bytes, "bytes"),
        ((date, time), "a date"),
        (type(None), "null"),
    )
    return next((words for kind, words in kinds if isinstance(value, kind)), "a value that JSON does not have")


def names_of(fields: dict) -> str:
    """The first fields of an object, for an error."""
    shown = [ascii(str(name)[:40]) + " (null)" * (value is None) for name, value in islice(fields.items(), 8)]
    more = len(fields) - len(shown)
    return (", ".join(shown) or "no field") + (f" and {more} more" if more else "")


def string(where: str, fields: dict, name: str) -> str:
    """The field `name`, which must be text that UTF-8 can hold. Raises DataError."""
    value = fields[name]
    if not isinstance(value, str):
        raise DataError(f"{where}: {name!r} must be a string, not {kind_of(value)}")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{where}: {name!r} has half a surrogate pair at character {error.start}; "
                "write the whole pair, or leave the character out"
            ) from error
    return value
