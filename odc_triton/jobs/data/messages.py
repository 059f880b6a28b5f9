"""Messages of a conversation, their tool calls, and the tools: checked, and in the form that chat templates take.

    {"role": "user", "content": …}       as OpenAI, transformers and TRL have them
    {"from": "human", "value": …}        as ShareGPT, LLaMA-Factory and axolotl have them

A content is a text, or a list of texts and images (`parts`). A list of messages,
or of tools, may be written as a string of JSON: CSV and many tables have no lists.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from difflib import get_close_matches
from typing import Any

from .parts import read_parts
from .records import DataError, from_json, kind_of, names_of, string

Message = dict[str, Any]
# ShareGPT's roles, with LLaMA-Factory's for tools. A function_call is a turn of the assistant.
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "function_call": "assistant"}
_ROLES |= {"system": "system", "tool": "tool", "observation": "tool"}
# Names and texts of marks by which data say that a turn is to be learned, or not: as loss_mask, isTrainable, no_loss.
_KIND = r"(loss|train(ed|ing|able)?|learn(ed|able)?|target|supervised?|weight)"
_LEARNED = re.compile(rf"((is|to|do|should|step|turn|message)_)?{_KIND}(_(mask|weight|scale|detail|on_turn|turn))?")
_FROM = r"(_(from|in))?(_(turn|message|loss|training))?"
_LEFT_OUT = re.compile(rf"(is_|to_)?(mask|ignore|skip|exclude)(ed|d|ped)?{_FROM}|(is_)?(no|not|dont|do_not)_?{_KIND}")
_WORDS = {"false": 0, "f": 0, "no": 0, "n": 0, "off": 0, "none": 0, "true": 1, "t": 1, "yes": 1, "y": 1, "on": 1}


def read_messages(where: str, fields: dict, name: str) -> list[Message]:
    """The messages in the field `name`, at least one, each with `role` and `content` (or `tool_calls`).

    Raises DataError, which names a message of the field `messages` by its number alone.
    """
    messages = from_json(fields[name])
    if not isinstance(messages, list) or not messages:
        what = "an empty list" if messages == [] else kind_of(messages)
        raise DataError(f"{where}: {name!r} must be a list of at least one message, not {what}")
    prefix = "" if name == "messages" else f"{name!r}, "
    return [_message(f"{where}: {prefix}message {number}", each) for number, each in enumerate(messages)]


def read_tools(where: str, fields: dict) -> list[dict[str, Any]] | None:
    """The field `tools`; None if it is missing or empty. Raises DataError."""
    tools = from_json(fields.get("tools"))
    if tools is None or tools in ([], ""):
        return None
    tools = [from_json(each) for each in tools] if isinstance(tools, list) else tools
    if not isinstance(tools, list) or not all(isinstance(each, dict) for each in tools):
        raise DataError(
            f"{where}: 'tools' must be a list of objects, the functions' JSON schemas, or the JSON of one, not "
            f"{ascii(tools)[:60]}"
        )
    _check_json(f"{where}: 'tools'", tools)
    return tools


def with_system(where: str, fields: dict, messages: list[Message]) -> list[Message]:
    """ShareGPT's field `system`, if it has any text, as the first message. Raises DataError if there are two."""
    if fields.get("system") in (None, ""):
        return messages
    system = string(where, fields, "system")
    if messages[0]["role"] == "system":
        raise DataError(f"{where}: has 'system' and also begins with a system message; keep one of them")
    return [{"role": "system", "content": system}, *messages]


def unlearned_mark(message: Message) -> str | None:
    """The field that says that not all of this turn is learned with weight 1; None: there is none."""
    for name, value in message.items():
        plain = re.sub(r"(?<=[a-z])([A-Z])", r"_\1", name).replace("-", "_").lower()
        is_left_out = _LEFT_OUT.fullmatch(plain)
        if value in ("", [], {}) or not (is_left_out or _LEARNED.fullmatch(plain)):
            continue
        if isinstance(value, str):
            with suppress(ValueError):  # another text is no mark
                value = _WORDS.get(word := value.strip().lower(), None if word.isalpha() else float(word))
        if isinstance(value, (list, dict)):  # of parts of the turn
            return name
        if isinstance(value, (int, float)) and (value in (0, 1) or "weight" in plain) and value != (not is_left_out):
            return name  # other numbers are measured
    return None


def _message(here: str, message: Any) -> Message:
    if not isinstance(message, dict):
        raise DataError(f"{here} is {kind_of(message)}, not an object with 'role' and 'content'")
    given, message = message, {name: value for name, value in message.items() if value is not None}
    if "role" not in message and {"from", "value"} <= message.keys():
        message = _of_sharegpt(here, message)
    if not (calls := from_json(message.get("tool_calls"))):
        message.pop("tool_calls", None)
    if calls := message.get("role") in ("assistant", "gpt") and calls:
        message["tool_calls"] = calls = _calls(f"{here}: 'tool_calls'", calls)
    for name in ("role", "content"):
        if name not in message:
            if name == "content" and calls:
                continue
            raise DataError(f"{here} needs 'role' and 'content', or 'from' and 'value'; it has {names_of(given)}")
        if name == "content" and isinstance(message[name], list):
            message = message | {"content": read_parts(here, message[name])}
        else:
            string(here, message, name)
    role = message["role"]
    is_known = role in _ROLES or re.fullmatch(r"user[\s_-]*\d+", role)  # the second of several users
    if not is_known and (meant := get_close_matches(role.strip().lower(), _ROLES, n=1, cutoff=0.8)):
        raise DataError(f"{here} has the role {role!r}: write {meant[0]!r}, if it is that")
    # The template may use other fields: reasoning, tool calls, a name.
    others = {name: value for name, value in message.items() if name not in ("role", "content")}
    if others:
        _check_json(f"{here} has another field than 'role' and 'content' that", others)
    checked = dict(message)
    if role in ("human", "gpt"):  # which no template knows
        checked["role"] = _ROLES[role]
    if calls:
        checked["tool_calls"] = _with_objects(calls)
    return checked


def _of_sharegpt(here: str, message: Message) -> Message:
    given, value = string(here, message, "from"), string(here, message, "value")
    if given not in _ROLES:
        raise DataError(f"{here} has the role {given!r}; write one of {', '.join(_ROLES)}")
    others = {name: each for name, each in message.items() if name not in ("from", "value")}
    if given == "function_call":
        return {"role": "assistant", "tool_calls": _calls(f"{here} is a function_call, whose 'value'", value), **others}
    return {"role": _ROLES[given], "content": value, **others}


def _calls(what: str, value: Any) -> list[dict[str, Any]]:
    """Calls as OpenAI has them, of one call or a list of them, also without "function" or as a string of JSON."""
    calls = from_json(value)
    calls = [calls] if isinstance(calls, dict) else calls
    calls = [from_json(each) for each in calls] if isinstance(calls, list) else [calls]
    found = []
    for call in calls:
        call = {name: each for name, each in call.items() if each is not None} if isinstance(call, dict) else {}
        if "function" not in call:
            outside = {name: call.pop(name) for name in ("id", "type") if name in call}
            call = {"type": "function", **outside, "function": call}
        function = call["function"]
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise DataError(
                f"{what} must be an object with 'name' and 'arguments', or a list of them, or the JSON of it, not "
                f"{ascii(value)[:60]}"
            )
        found.append(call)
    return found


def _with_objects(calls: Any) -> Any:
    """Calls whose `arguments` are objects, as templates want them; OpenAI's format has a string of JSON."""
    if isinstance(calls, list):
        return [_with_objects(each) for each in calls]
    if not isinstance(calls, dict):
        return calls
    calls = {name: _with_objects(value) if name == "function" else value for name, value in calls.items()}
    if isinstance(arguments := from_json(calls.get("arguments")), dict):
        calls["arguments"] = arguments
    return calls


def _check_json(what: str, value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        reason = str(error).encode("ascii", "backslashreplace").decode()
        raise DataError(f"{what} is not JSON: {reason}; leave it out") from error
