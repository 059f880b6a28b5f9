"""Rewards that `train grpo` has by name, with the meaning that TRL and open-r1 give them.

accuracy: 1 if the completion's final answer equals the row's `answer` or `solution`, else 0; None if that is not known.
format: 1 for <think>…</think> and an answer after it, else 0.
length: 0 up to four fifths of --max-new-tokens, from there falling to -1 (DAPO's soft overlong punishment).
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import multiprocessing
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..data.records import content_text
from .answers import LONGEST, can_be_read, final_answer, same_answer

ACCURACY = "accuracy"
NAMES = (ACCURACY, "format", "length")
REFERENCES = ("answer", "solution")  # columns; a row's first that is there counts
_COMPARISON_S = 5.0  # most for one completion
_MEMORY_BYTES = 4 * 2**30  # of the process that compares, in addition to what it starts with


def named_reward(name: str, *, max_new_tokens: int, timeout_s: float) -> Callable[..., list[float | None]]:
    """The function. `timeout_s`: of a batch, of which accuracy takes at most half."""
    return _format if name == "format" else _length(max_new_tokens) if name == "length" else _Accuracy(timeout_s / 2)


def missing_columns(name: str, columns: Sequence[str]) -> str | None:
    """What is wrong with the data's `columns`, if anything."""
    if name != ACCURACY or {*REFERENCES} & {*columns}:
        return None
    return (
        f"reward accuracy compares with the column 'answer' or 'solution', and the data have "
        f"{', '.join(map(repr, columns)) or 'no column'} in addition to the prompt: give --map answer=COLUMN"
    )


def without_answer(rows: Sequence[Mapping[str, Any]]) -> str:
    """How many of the prompts with these columns have no answer that accuracy can compare, in words; "" if none."""
    references = [_reference_of(next(filter(_is_there, map(row.get, REFERENCES)), None)) for row in rows]
    missing, unread = references.count(None), 0
    if importlib.util.find_spec("math_verify") is None:
        unread = sum(each is not None and not can_be_read(each) for each in references)
    words = {
        "have none in 'answer' or 'solution'": missing,
        "have no number or word, which only the same text equals (math-verify reads more)": unread,
    }
    said = "; ".join(f"{count} {what}" for what, count in words.items() if count)
    return said and f"{missing + unread} of {len(rows)} prompts have no answer that reward accuracy compares: {said}"


def _is_there(value: Any) -> bool:
    return value not in (None, "")


def _reference_of(row: Any) -> str | None:
    """The answer in a row's column, of at most LONGEST characters."""
    if not isinstance(row, (str, int, float)):
        return None
    reference = (final_answer(str(row)) or str(row)).strip()
    return reference if 0 < len(reference) <= LONGEST else None


def _text_of(completion: str | list[dict[str, Any]]) -> str:
    if isinstance(completion, str):
        return completion
    return content_text({"content": completion[-1].get("content") or ""}) if completion else ""


def _format(completions: Sequence[Any], **_: Any) -> list[float | None]:
    def is_right(text: str) -> bool:
        begin, _, answer = text.partition("</think>")
        return begin.startswith("<think>") and text.count("<think>") == 1 and bool(answer.strip())

    return [float(is_right(_text_of(each))) for each in completions]


def _length(most: int) -> Callable[..., list[float | None]]:
    soft = max(most // 5, 1)
    free = most - soft
    return lambda completion_ids, **_: [min(0.0, max(-1.0, (free - len(ids)) / soft)) for ids in completion_ids]


class _Accuracy:
    """The reward. `seconds`: most for a batch; answers that are left then are not compared."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._seen, self._open, self._said = seconds, 0, 0, 0
        self._verifier: _Verifier | None = None
        with contextlib.suppress(ImportError):
            importlib.import_module("math_verify")  # once: the process is forked
            self._verifier = _Verifier()

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        deadline = time.monotonic() + self._seconds
        given = [columns[name] for name in REFERENCES if name in columns]
        rows = [next(filter(_is_there, row), None) for row in zip(*given, strict=True)]
        rows = rows or [None] * len(completions)
        found = [self._compare(*pair, deadline) for pair in zip(rows, completions, strict=True)]
        self._seen, self._open = self._seen + len(found), self._open + found.count(None)
        if self._open >= 2 * self._said and self._open:  # a line each time that they have doubled
            self._said = self._open
            remedy = "; pip install math-verify compares more" if self._verifier is None else ""
            if without := sum(not isinstance(each, (str, int, float)) for each in rows):
                remedy = f"; {without} completions of this batch are of rows without 'answer' or 'solution'"
            print(f"reward accuracy: {self._open} of {self._seen} answers are not compared{remedy}", file=sys.stderr)
        return [None if each is None else float(each) for each in found]

    def _compare(self, row: Any, completion: Any, deadline: float) -> bool | None:
        if (reference := _reference_of(row)) is None:
            return None
        answer = final_answer(_text_of(completion))
        if answer is None or len(answer) > LONGEST:
            return False
        if self._verifier is None:
            return same_answer(reference, answer)
        left_s = deadline - time.monotonic()
        found = self._verifier.compare(reference, answer, min(_COMPARISON_S, left_s))
        return None if found is False and left_s < _COMPARISON_S and time.monotonic() >= deadline else found


class _Verifier:
    """math_verify in a process of its own: its time limit does not interrupt a power of large numbers, nor a regex."""

    _process: Any = None

    def compare(self, reference: str, answer: str, seconds: float) -> bool | None:
        """None: the reference can't be read, or there is no time. An answer that takes too long is wrong."""
        if seconds <= 0:
            return None
        if self._process is None:
            self._pipe, theirs = multiprocessing.Pipe()
            self._process = multiprocessing.get_context("fork").Process(target=_verify, args=(theirs,), daemon=True)
            self._process.start()
            theirs.close()
        try:
            self._pipe.send((reference, answer))
            if self._pipe.poll(seconds):
                return self._pipe.recv()
        except (EOFError, OSError):  # it crashed
            pass
        self._process.kill()
        self._process.join()
        self._process = None
        return False


def _verify(pipe: Any) -> None:
    """Compares as TRL's accuracy_reward does, which takes answers in boxes alone."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    with open("/proc/self/statm") as file:
        most = int(file.read().split()[0]) * resource.getpagesize() + _MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    logging.disable()  # it logs whole texts
    config = LatexExtractionConfig(
        normalization_config=NormalizationConfig(units=True), boxed_match_priority=0, try_extract_without_anchor=False
    )
    while True:
        reference, answer = (f"\\boxed{{{each}}}" for each in pipe.recv())
        gold = parse(reference)
        known = parse(answer, extraction_config=[config], extraction_mode="first_match") if gold else []
        pipe.send(bool(verify(gold, known)) if gold else None)
