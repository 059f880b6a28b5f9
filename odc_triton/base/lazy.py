"""Public names of a package that are imported on first use, so that its pure modules stay free of torch."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any


def lazy_names(
    package: str, home: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of `package`, whose names are in the modules that `home` gives."""
    names = sorted(home)

    def getattr_(name: str) -> object:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f".{home[name]}", package), name)

    def dir_() -> list[str]:
        return sorted({*vars(importlib.import_module(package)), *names})

    return getattr_, dir_, names


class _Moved(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules under former names: the same module object under either name."""

    def __init__(self, moved: Mapping[str, str]) -> None:
        self._moved = moved

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self) if name in self._moved else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._moved[spec.name])
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = module.__spec__.loader_state  # the import system has just set the former name's


def keep_importable(moved: Mapping[str, str]) -> None:
    """Keeps modules importable by their former names: `moved` maps each to the present one, both in full."""
    if not any(isinstance(finder, _Moved) and finder._moved == moved for finder in sys.meta_path):
        sys.meta_path.append(_Moved(moved))
