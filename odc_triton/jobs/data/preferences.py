"""Preference pairs: each row is two records, first the chosen one.

    {"prompt": …, "chosen": …, "rejected": …}     text, or lists of messages
    {"chosen": …, "rejected": …}                  the same without a prompt, which is what both begin with

Next to messages `prompt` may be text: what their first one says, or the user's turn before them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any

from .forms import record_of
from .records import DataError, Record, kind_of, names_of
from .sources import RecordSource

_FORMS = "'chosen' and 'rejected', text or messages, and maybe 'prompt'"


class PairSource(RecordSource):
    """The pairs of a source, as records 2i and 2i + 1."""

    def __init__(self, source: RecordSource) -> None:
        self._source, self.name = source, source.name

    def __iter__(self) -> Iterator[Record]:
        return (record for where, value, _ in self.rows() for record in pair_of(where, value))

    def rows(self) -> Iterator[tuple[str, Any, str | None]]:
        return self._source.rows()

    def fingerprint(self) -> str | None:
        return self._source.fingerprint()


def pair_of(where: str, value: Any) -> tuple[Record, Record]:
    """The chosen and the rejected record of one row. Raises DataError."""
    if not isinstance(value, dict):
        raise DataError(f"{where}: {kind_of(value)}, not an object with {_FORMS}")
    fields = {name: each for name, each in value.items() if each is not None}
    if missing := [name for name in ("chosen", "rejected") if name not in fields]:
        raise DataError(
            f"{where}: has no {' and no '.join(map(repr, missing))}: a pair needs {_FORMS}; it has {names_of(value)}"
        )
    prompt, chosen, rejected = fields.get("prompt"), fields["chosen"], fields["rejected"]
    if (are_lists := isinstance(chosen, list)) != isinstance(rejected, list):
        raise DataError(
            f"{where}: 'chosen' is {kind_of(chosen)} and 'rejected' is {kind_of(rejected)}; give both as text, or both "
            f"as lists of messages"
        )
    if are_lists and not isinstance(prompt, list):
        prompt, chosen, rejected = _of_messages(where, prompt, chosen, rejected)
    elif isinstance(prompt, list) and are_lists and chosen[: len(prompt)] == rejected[: len(prompt)] == prompt:
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    elif prompt is None and isinstance(chosen, str) and isinstance(rejected, str):
        common = chosen[: _alike(chosen, rejected)]
        ends = [common.rfind(space) for space in (" ", "\n", "\t")]  # the space belongs to the word after it, as in TRL
        prompt = common[: max(0, *ends)]
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    others = {name: fields[name] for name in ("tools", "images", "image") if name in fields}
    made = []
    for name, completion in (("chosen", chosen), ("rejected", rejected)):
        try:
            made.append(record_of(f"{where}, {name}", {"prompt": prompt, "completion": completion, **others}))
        except DataError as error:
            raise DataError(str(error).replace("'completion'", repr(name))) from error
    if made[0].images:
        raise DataError(f"{where}: has images, which pairs can't have yet: leave them out")
    return made[0], made[1]


def _of_messages(
    where: str, prompt: Any, chosen: list[Any], rejected: list[Any]
) -> tuple[list[Any], list[Any], list[Any]]:
    """Whole conversations, or turns after the user's `prompt`, as (the messages that both begin with, the others)."""
    first = [each[0] for each in (chosen, rejected) if each and isinstance(each[0], dict)]
    if isinstance(prompt, str) and [each.get("role") for each in first] == ["assistant"] * 2:
        return [{"role": "user", "content": prompt}], chosen, rejected
    if chosen[:1] != rejected[:1] or not chosen:
        raise DataError(
            f"{where}: 'chosen' and 'rejected' begin with different messages, or have none, and there is no 'prompt': "
            f"give the turns before them as 'prompt'"
        )
    same = _alike(chosen[:-1], rejected[:-1])  # the last turn is learned, also if it is the same
    return chosen[:same], chosen[same:], rejected[same:]


def _alike(one: Sequence[Any], other: Sequence[Any]) -> int:
    """With how many of the same both begin."""
    return len([*takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))])
