"""Options are frozen dataclasses; this makes command-line arguments of them and reads them back."""

from __future__ import annotations

import argparse
import types
import typing
from dataclasses import MISSING, fields
from typing import Any, TypeVar

Options = TypeVar("Options")


def add_arguments(parser: argparse.ArgumentParser, kind: type) -> None:
    """One `--name` per field of the dataclass `kind`, with its help (`metadata["help"]`), choices and default.

    Fields may be int, float, str, bool (`--name/--no-name`), a Literal of strings, or one of them or None.
    """
    hints = typing.get_type_hints(kind)
    named = " ".join(action.metavar or action.dest for action in parser._get_positional_actions())
    parser.usage = f"%(prog)s {named}{' ' if named else ''}--NAME VALUE …  (--help lists the names)"  # they are many
    group = parser.add_argument_group(kind.__doc__.strip().splitlines()[0].rstrip("."))
    for entry in fields(kind):
        flag = "--" + entry.name.replace("_", "-")
        required = entry.default is MISSING and entry.default_factory is MISSING
        text = entry.metadata["help"]
        if not required:
            text += " (default: none)" if entry.default is None else f" (default: {entry.default})"
        settings: dict[str, Any] = {"help": text.replace("%", "%%"), "default": argparse.SUPPRESS}
        hint = _without_none(hints[entry.name])
        if hint is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, **settings)
        elif typing.get_origin(hint) is typing.Literal:
            group.add_argument(flag, choices=typing.get_args(hint), required=required, **settings)
        else:
            group.add_argument(flag, type=hint, metavar=hint.__name__.upper(), required=required, **settings)


def _without_none(hint: Any) -> Any:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return next(part for part in typing.get_args(hint) if part is not type(None))
    return hint


def read_options(kind: type[Options], namespace: argparse.Namespace) -> Options:
    """The dataclass from parsed arguments; what was not given takes its default. Raises what its checks raise."""
    given = vars(namespace)
    return kind(**{entry.name: given[entry.name] for entry in fields(kind) if entry.name in given})
