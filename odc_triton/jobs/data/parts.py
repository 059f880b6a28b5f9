"""Images of a conversation: their places among its texts, and what each is read from.

    {"content": [{"type": "image"}, {"type": "text", "text": …}]}   and the record's `images`, in order
    {"content": [{"type": "image", "image": …}, …]}                 or "path", "url", "base64"; as transformers has it
    {"content": [{"type": "image_url", "image_url": {"url": …}}]}   as OpenAI
    {"content": "<image>\\nWhat is this?"}                           and `images`, or `image`; LLaVA, LLaMA-Factory
    {"content": "What is this?"}                                    and `images`: in front of the first user message, as
                                                                    TRL's `prepare_multimodal_messages`

An image is a path (relative to the folder of its data file), bytes, a data URL, base64, a URL, or the struct of
`datasets`' image columns, {"bytes": …, "path": …}.
"""

from __future__ import annotations

import base64
import binascii
import unicodedata
from typing import Any, TypeAlias

from .records import DataError, from_json, kind_of, names_of, string

Source: TypeAlias = "str | bytes"  # a path, a URL, or the image itself
_MARK = "<image>"
_FIELDS = ("images", "image")  # of a record
_KEYS = ("image", "path", "url", "base64")  # of a part
_BASE64 = ("iVBORw0KGgo", "/9j/", "R0lGOD", "UklGR")  # how PNG, JPEG, GIF and WebP begin


def read_parts(here: str, parts: list[Any]) -> list[dict[str, Any]]:
    """The parts of one message, {"type": "text", "text": …} or {"type": "image"} with its source under "image", if it
    has one. Raises DataError, which begins with `here`.
    """
    return [_part(f"{here}, part {number}", part) for number, part in enumerate(parts)]


def _part(here: str, part: Any) -> dict[str, Any]:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        has = names_of(part) if isinstance(part, dict) else kind_of(part)
        raise DataError(f'{here} is no object with a "type", as {{"type": "text", "text": …}}; it has {has}')
    part = {name: value for name, value in part.items() if value is not None}
    kind = part["type"]
    if kind == "text":
        if "text" not in part:
            raise DataError(f"{here} is a text without 'text'; it has {names_of(part)}")
        return {"type": "text", "text": string(here, part, "text")}
    if kind == "image_url":
        url = part.get("image_url")
        part = {"url": url.get("url") if isinstance(url, dict) else url}
    elif kind != "image":
        raise DataError(f"{here} has the type {kind!r}; only texts and images are supported, so leave it out")
    found = [part[name] for name in _KEYS if name in part]
    if len(found) > 1:
        raise DataError(f"{here} has {names_of(part)}: give one image a part")
    if not found:
        return {"type": "image"}
    return {"type": "image", "image": _source(here, found[0], is_base64="base64" in part)}


def _source(here: str, value: Any, is_base64: bool = False) -> Source:
    """A path, a URL, or the image's bytes. Raises DataError."""
    if isinstance(value, dict) and value.keys() <= {"bytes", "path"}:
        value = value.get("path") if value.get("bytes") is None else value["bytes"]
    if isinstance(value, (bytes, bytearray)):
        return bytes(value)
    if not isinstance(value, str):
        given = type(value).__name__ if kind_of(value).startswith("a value") else kind_of(value)
        raise DataError(f"{here}: an image is a path, a URL, base64 or bytes, not {given}")
    if value.startswith("data:"):
        head, _, value = value.partition(",")
        is_base64 = True
        if not head.endswith(";base64"):
            raise DataError(
                f"{here}: a data URL must be base64, as data:image/png;base64,…; it begins with {head[:40]!r}"
            )
    if is_base64 or value.startswith(_BASE64):
        try:
            return base64.b64decode("".join(value.split()), validate=True)
        except (binascii.Error, ValueError) as error:
            raise DataError(f"{here}: its base64 is damaged: {error}") from error
    if not value or any(unicodedata.category(each) in ("Cc", "Cs") for each in value):  # a control, half a surrogate
        raise DataError(f"{here}: {value[:100]!a} is the path of no image")
    return value


def place_images(
    where: str, fields: dict[str, Any], messages: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], tuple[Source, ...]]:
    """(the messages, whose images are only {"type": "image"}; the images, in order). Raises DataError."""
    name, given = given_images(where, fields)
    contents = [message.get("content", "") for message in messages]
    if given and all(isinstance(content, str) for content in contents):
        if any(_MARK in content for content in contents):
            contents = [_split(content) for content in contents]
        elif "user" in (roles := [message["role"] for message in messages]):
            first = roles.index("user")
            contents[first] = [{"type": "image"}] * len(given) + [{"type": "text", "text": contents[first]}]
    sources, placed = [], []  # of a source: None if it is one of those given
    for number, (message, content) in enumerate(zip(messages, contents, strict=True)):
        if isinstance(content, list):
            images = [part for part in content if part["type"] == "image"]
            if images and message["role"] == "assistant":
                raise DataError(
                    f"{where}: message {number} of the assistant has an image, which a model can't learn to write; "
                    "put it into a message of the user"
                )
            sources += [part.get("image") for part in images]
            message = message | {"content": [{"type": "image"} if part in images else part for part in content]}
        placed.append(message)
    if (places := sources.count(None)) != len(given):
        raise DataError(
            f"{where}: has {len(given)} images in {name!r} and its messages have {places} places for them: give each "
            f'image its {{"type": "image"}} or {_MARK}, and each of these its image'
        )
    rest = iter(given)
    return placed, tuple(next(rest) if source is None else source for source in sources)


def given_images(where: str, fields: dict[str, Any]) -> tuple[str, list[Source]]:
    """(the field of a record that has its images, its images). Raises DataError."""
    if fields.get("videos") not in (None, "", []):
        raise DataError(f"{where}: has 'videos'; only texts and images are supported, so leave the record out")
    found = [name for name in _FIELDS if fields.get(name) not in (None, "", [])]
    if len(found) > 1:
        raise DataError(f"{where}: has 'images' and also 'image'; keep one of them")
    if not found:
        return _FIELDS[0], []
    values = fields[found[0]]
    if isinstance(values, str) and values.startswith("["):  # of CSV
        values = from_json(values)
    values = values if isinstance(values, list) else [values]
    return found[0], [_source(f"{where}: image {at} of {found[0]!r}", each) for at, each in enumerate(values, 1)]


def _split(content: str) -> str | list[dict[str, Any]]:
    if _MARK not in content:
        return content
    parts: list[dict[str, Any]] = []
    for at, text in enumerate(content.split(_MARK)):
        parts += [{"type": "image"}] * (at > 0) + [{"type": "text", "text": text}] * (text != "")
    return parts
