"""Attributes that a type checker does not know."""

from __future__ import annotations

from typing import Any


def untyped(thing: object) -> Any:
    """`thing`: for torch's stubs a module has only tensors and modules, and a tensor no marks."""
    return thing
