"""What `bench.kernels.run` measures: one file per kernel with its `OPERATORS`, found by being here."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from . import place as place  # isort: skip

from .operator import Operator


def all_operators() -> dict[str, Operator]:
    """By name, in the order in which they run: what only reads peers first, for a fault in adding ends a run."""
    found = [
        operator
        for module in iter_modules(__path__)
        for operator in getattr(import_module(f"{__name__}.{module.name}"), "OPERATORS", ())
    ]
    return {operator.name: operator for operator in sorted(found, key=lambda each: (each.reduces, each.name))}
