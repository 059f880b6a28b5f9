"""A finding of the doctor, and its formatting."""

from __future__ import annotations

from dataclasses import dataclass

OK, NOTE, PROBLEM = "ok", "note", "problem"
WIDTH = 100  # columns


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. Only a problem changes the command's exit status."""

    level: str
    topic: str
    text: str
    remedy: str | None = None


def dotted(compute_capability: tuple[int, int] | None) -> str:
    return ".".join(map(str, compute_capability or ("?",)))


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
