"""Prompts of reinforcement learning: text or messages, encoded as in `train sft`, with their columns."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from ..data.messages import read_messages
from ..data.parts import place_images
from ..data.records import DataError, content_text, kind_of, names_of, string
from ..data.sources import RecordSource, open_source
from ..data.tokenizer import TextEncoder

_NOT_COLUMNS = ("prompt", "completion", "completions", "prompts", "completion_ids")  # as in TRL


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """ids: its tokens, with the template's header of the assistant's turn. given: text, or messages."""

    ids: list[int]
    given: str | list[dict[str, Any]]
    columns: dict[str, Any]


class Prompts(Sequence[Prompt]):
    """The prompts of a source. `columns`: the names of all their other fields, for reward functions."""

    def __init__(self, prompts: list[Prompt], name: str, *, dropped: int = 0) -> None:
        self._prompts, self.name, self.dropped = prompts, name, dropped
        self.columns = sorted({name for each in prompts for name in each.columns})

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: Any) -> Any:
        return self._prompts[index]

    @property
    def longest(self) -> int:
        """Tokens of the longest."""
        return max((len(each.ids) for each in self), default=0)

    @property
    def largest_token(self) -> int:
        return max((max(each.ids) for each in self), default=0)

    def digest(self) -> str:
        """A digest of all tokens and columns."""
        found = hashlib.sha256()
        for each in self:
            found.update(json.dumps([each.ids, each.columns], sort_keys=True, default=str).encode())
        return found.hexdigest()[:32]


def joined_prompts(sets: Sequence[Prompts], copies: Sequence[int]) -> Prompts:
    """The prompts of several sets, as `Mix` numbers them."""
    prompts = [prompt for each, n in zip(sets, copies, strict=True) for _ in range(n) for prompt in each]
    return Prompts(prompts, ", ".join(each.name for each in sets))


def read_prompts(
    name: str,
    tokenizer: Any,
    *,
    most_tokens: int,
    drop_long: bool = False,
    first: int = 0,
    columns: Mapping[str, str] | None = None,
) -> Prompts:
    """The prompts of any source and its `columns` (see `open_source`): records with `prompt`, text or messages.

    `most_tokens`: of a prompt; longer ones are dropped if `drop_long`. `first`: the number to read, 0 for all.

    Raises DataError with file and line for an unusable prompt, and if none is left.
    """
    prompts, dropped = [], 0
    for where, given, others, ids in _encoded(open_source(name, columns), tokenizer, first):
        if len(ids) > most_tokens:
            if not drop_long:
                raise DataError(
                    f"{where}: the prompt has {len(ids)} tokens, and {max(most_tokens, 0)} fit: --token-cap is for "
                    f"prompt and completion together, so raise it, lower --max-new-tokens, or give --drop-long"
                )
            dropped += 1
            continue
        if not ids:
            raise DataError(f"{where}: the prompt has no tokens; write at least one word")
        prompts.append(Prompt(ids=ids, given=given, columns=others))
    if not prompts and not (first and dropped):  # later ones may fit
        raise DataError(f"{name} has no prompt that fits: each of its {dropped} has more than {most_tokens} tokens")
    return Prompts(prompts, name, dropped=dropped)


def _encoded(source: RecordSource, tokenizer: Any, first: int) -> Iterator[tuple[str, Any, dict, list[int]]]:
    """(name in errors, prompt, columns, tokens) of each record."""
    encoder, rows = TextEncoder.of(tokenizer), islice(source.rows(), first or None)
    records = [
        (where, prompt_of(where, row), {k: v for k, v in row.items() if k not in _NOT_COLUMNS})
        for where, row, _ in rows
    ]
    plain = iter(encoder.encode_batch([given for _, given, _ in records if isinstance(given, str)]))
    for where, given, columns in records:
        if isinstance(given, str):
            ids = [*encoder.begun(encoder.before_prompt, next(plain)), *encoder.before_completion]
        else:
            try:
                text = tokenizer.apply_chat_template(given, tokenize=False, add_generation_prompt=True)
            except Exception as error:  # the template's code may raise anything
                raise DataError(f"{where}: the prompt's messages can't be rendered: {error}") from error
            (ids,) = encoder.encode_batch([text])
        yield where, given, columns, list(ids)


def prompt_of(where: str, row: Any) -> str | list[dict[str, Any]]:
    """The prompt of one row. Raises DataError."""
    if not isinstance(row, dict):
        raise DataError(f"{where}: {kind_of(row)}, not an object with 'prompt', text or messages")
    if row.get("prompt") is None:
        has = f"it has {names_of(row)}: --map prompt=COLUMN names one of them"
        raise DataError(f"{where}: needs 'prompt', text or messages; {has}")
    if isinstance(row["prompt"], str):
        return string(where, row, "prompt")
    messages, images = place_images(where, row, read_messages(where, row, "prompt"))
    if images:
        raise DataError(f"{where}: the prompt has images, which train grpo does not support; leave it out")
    return [each | {"content": content_text(each)} if "content" in each else each for each in messages]


def completion_seed(seed: int, step: int, prompt: int, generation: int) -> int:
    """63 bits for one completion, the same on any rank. `prompt`: its place among the step's prompts."""
    digest = hashlib.blake2b(f"{seed} {step} {prompt} {generation}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
