"""What `bench.kernels.aot` compiles, and how its code is judged.

A file per kernel with `cases()`, every default configuration × dtype; `code` reads the compiler's output, `offsets`
the arithmetic of addresses.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules

from .case import Case as Case


def modules() -> list[str]:
    """The modules that have cases of the project's kernels."""
    names = sorted(module.name for module in iter_modules(__path__))
    return [f"{__name__}.{name}" for name in names if hasattr(import_module(f"{__name__}.{name}"), "cases")]


def all_cases(names: list[str] | None = None) -> Iterator[Case]:
    """The cases of the modules `names`, by default of all `modules()`. Raises ValueError if two have one name."""
    seen = set()
    for name in names or modules():
        for case in import_module(name).cases():
            if case.name in seen:
                raise ValueError(f"two cases are called {case.name!r}; rename one of them in {name}")
            seen.add(case.name)
            yield case
