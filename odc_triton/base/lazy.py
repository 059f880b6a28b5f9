"""Public names of a package that are imported on first use, so that its pure modules stay free of torch."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable
from typing import Any

_NAME = re.compile(r"^from (\S+) import (\w+) as \2$", re.M)


def lazy_names(package: str, *unlisted: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of `package`; the last two without the names `unlisted`.

    Its `__init__.pyi` has the modules of all names, one import a line; type checkers read it too.
    """
    stub = pkgutil.get_data(package, "__init__.pyi") or b""  # also in a zip
    home = {name: module for module, name in _NAME.findall(stub.decode())}
    names = sorted(home.keys() - set(unlisted))

    def getattr_(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(home[name], package), name)

    def dir_() -> list[str]:
        return sorted({*vars(importlib.import_module(package)), *names})

    return getattr_, dir_, names
