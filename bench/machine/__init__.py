"""What `bench.aot` compiles: one file per kernel, each with `cases()`, every default configuration × dtype."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules

from .case import Case as Case


def all_cases() -> Iterator[Case]:
    for module in sorted(iter_modules(__path__), key=lambda module: module.name):
        if module.name != "case":
            yield from import_module(f"{__name__}.{module.name}").cases()
