"""Forms of records: the fields of each, and the part that is learned.

    {"text": …}                                            all of it
    {"prompt": …, "completion": …}                         the completion
    {"prompt": [message, …], "completion": [message, …]}   the assistant's messages of the completion
    {"messages": [message, …]}                             the assistant's messages
    {"conversations": [message, …]}                        the same; ShareGPT's form, which may have `system`
    {"instruction": …, "input": …, "output": …}            the output; Alpaca's form

Other fields are ignored, and a field that is null counts as missing. Next to messages there may be `tools`, and the
assistant may call them: its message has `tool_calls`, and its `content` may be null. Messages may have images, and
next to them there may be `images` or `image` (`parts`).
"""

from __future__ import annotations

from typing import Any

from .messages import read_messages, read_tools, unlearned_mark, with_system
from .parts import given_images, place_images
from .records import IMAGE_CHARACTERS, DataError, Form, Record, kind_of, message_text, names_of, string

FORMS = (
    "'text', or both 'prompt' and 'completion', or 'messages', or 'conversations' (ShareGPT), or both 'instruction' "
    "and 'output' (Alpaca)"
)
_FIELDS: dict[tuple[str, ...], Form] = {
    ("text",): "text",
    ("messages",): "messages",
    ("conversations",): "conversations",
    ("prompt", "completion"): "prompt and completion",
    ("instruction", "output"): "Alpaca",
}


def record_of(where: str, value: Any, *, folder: str | None = None) -> Record:
    """The record in one line or row. `where`: its name in errors; `folder`: as in `Record`. Raises DataError."""
    if not isinstance(value, dict):
        raise DataError(f"{where}: {kind_of(value)}, not an object with {FORMS}")
    fields = {name: each for name, each in value.items() if each is not None}
    form = _recognised(where, fields, names_of(value))
    if form in ("messages", "conversations", "prompt and completion as messages"):
        messages, learned_from = _conversation(where, fields, form)
        for number, each in enumerate(messages[learned_from:]):
            if each["role"] == "assistant" and (mark := unlearned_mark(each)):
                raise DataError(
                    f"{where}: message {learned_from + number} has {mark} {ascii(each[mark])[:60]}, and all turns of "
                    f"the assistant are learned: give the messages before those to learn as 'prompt', and these as "
                    f"'completion', without {mark!r}"
                )
        messages, images = place_images(where, fields, messages)
        return Record(
            form=form,
            messages=messages,
            learned_from=learned_from,
            tools=read_tools(where, fields),
            images=images,
            folder=folder,
            where=where,
            characters=sum(len(message_text(each)) for each in messages) + IMAGE_CHARACTERS * len(images),
        )
    name, images = given_images(where, fields)
    if images:
        raise DataError(
            f"{where}: has {name!r}, and only 'messages' can have images: write the record as messages, or leave "
            f"{name!r} out"
        )
    if form == "Alpaca":
        prompt, completion = _alpaca(where, fields)
    else:
        prompt = None if form == "text" else string(where, fields, "prompt")
        completion = string(where, fields, "text" if form == "text" else "completion")
    characters = len(prompt or "") + len(completion)
    return Record(form=form, prompt=prompt, completion=completion, where=where, characters=characters)


def _recognised(where: str, fields: dict, names: str) -> Form:
    found = [each for each in _FIELDS if fields.keys() >= set(each)]
    if ("instruction", "output") in found and ("text",) in found:
        found.remove(("text",))  # in Stanford's own file it repeats the other fields in a template
    # A lone prompt next to messages repeats their first one, as in several well-known data sets.
    halves = [(name,) for name in ("prompt", "completion") if name in fields]
    if found == [("text",)] and halves:
        found += halves
    if len(found) > 1:
        first, *others = (name for each in found for name in each)
        raise DataError(f"{where}: has {first!r} and also {' and '.join(map(repr, others))}; keep one form")
    if not found:
        raise DataError(f"{where}: needs {FORMS}; it has {names}")
    if found == [("prompt", "completion")]:
        listed = [name for name in found[0] if isinstance(fields[name], list)]
        if len(listed) == 1:
            (other,) = {"prompt", "completion"} - set(listed)
            raise DataError(
                f"{where}: {listed[0]!r} is a list and {other!r} is {kind_of(fields[other])}; give both as text, or "
                "both as lists of messages"
            )
        return "prompt and completion as messages" if listed else "prompt and completion"
    return _FIELDS[found[0]]


def _conversation(where: str, fields: dict, form: Form) -> tuple[list[dict[str, Any]], int]:
    """(the messages, the first one that may be learned)."""
    if form in ("messages", "conversations"):
        messages = read_messages(where, fields, form)
        return messages if form == "messages" else with_system(where, fields, messages), 0
    prompt = read_messages(where, fields, "prompt")
    return prompt + read_messages(where, fields, "completion"), len(prompt)


def _alpaca(where: str, fields: dict) -> tuple[str, str]:
    for name in ("system", "history"):
        if fields.get(name):
            raise DataError(
                f"{where}: has {name!r} next to 'instruction', which a prompt without a chat template can't hold; "
                "write the conversation as 'messages'"
            )
    instruction, output = string(where, fields, "instruction"), string(where, fields, "output")
    given = string(where, fields, "input") if "input" in fields else ""
    return (f"{instruction}\n\n{given}" if given else instruction), output
