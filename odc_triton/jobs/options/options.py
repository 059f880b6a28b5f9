"""Options are frozen dataclasses: their fields, checks that several share, and their command-line arguments."""

from __future__ import annotations

import argparse
import os
import types
import typing
from collections.abc import Sequence
from dataclasses import MISSING, Field, field, fields
from pathlib import Path
from typing import Any, TypeVar

Options = TypeVar("Options")
_METAVARS = {str: "TEXT", int: "N", float: "X"}
RANKS_PER_CORE = 8  # each is a process that imports torch
REQUIRED: Any = MISSING  # the default of a required option


def option(default: Any, text: str, *, group: str | None = None, once: str | None = None) -> Any:
    """A field of an options dataclass, with its help text. `group`: a heading in `--help` above it and later fields.
    `once`: its former name, which commands and files still accept.
    """
    return field(default=default, metadata={"help": text, "group": group, "once": once})


def former_names(kind: type) -> dict[str, str]:
    """Names of fields of the options dataclass `kind`, by their former names."""
    return {each.metadata["once"]: each.name for each in fields(kind) if each.metadata.get("once") is not None}


def expanded(path: str | os.PathLike) -> str:
    """A path as text, with the user's home in place of `~`, which shells leave in `--out=~/run`, and YAML anywhere.

    Raises ValueError for the home of a user who is not there, TypeError for what is no path.
    """
    text = os.fspath(path)
    if not isinstance(text, str):
        raise TypeError(f"{path!r} is not text")
    if (found := os.path.expanduser(text)).startswith("~"):
        raise ValueError(f"{text} begins with the home of a user who does not exist: give another path, or ./{text}")
    return found


def parts_of(given: str | Sequence[str]) -> tuple[str, ...]:
    """The parts of a repeatable option that commas may separate too."""
    return tuple(part.strip() for each in ([given] if isinstance(given, str) else given) for part in each.split(","))


def columns_of(given: str | Sequence[str]) -> dict[str, str]:
    """The columns of data, by their new names, of `--map NAME=COLUMN`. Raises ValueError."""
    found: dict[str, str] = {}
    for part in parts_of(given):
        name, equals, column = (each.strip() for each in part.partition("="))
        if not (name and equals and column) or "=" in column:
            raise ValueError(f"--map is {part!r}; give NAME=COLUMN, as in --map prompt=question,completion=answer")
        if name in found:
            raise ValueError(f"--map gives {found[name]!r} and {column!r} the name {name!r}: keep one of them")
        if column in found.values():
            raise ValueError(f"--map gives {column!r} two names: keep one of them")
        found[name] = column
    return found


def plain_paths(options: Any, *names: str) -> None:
    """For a dataclass's `__post_init__`: the options `names`, text or Path objects, become `expanded` ones."""
    for name in names:
        if (value := getattr(options, name)) is None:
            continue
        try:
            is_many = isinstance(value, (tuple, list))
            object.__setattr__(options, name, tuple(map(expanded, value)) if is_many else expanded(value))
        except TypeError as error:
            raise ValueError(f"{flag(name)} is {value!r}; give a path") from error


def require_one_model(options: Any) -> None:
    """Raises ValueError unless exactly one of `model` and `init` is set, to a path of its own kind."""
    if (options.model is None) == (options.init is None):
        raise ValueError("give either --model or --init (a config.json)")
    if options.model is not None and (Path(options.model) / "run.json").exists():
        found = next((name for name in ("model", "adapter") if (Path(options.model) / name).is_dir()), None)
        where = "which has no model yet" if found is None else f"whose model is {Path(options.model) / found}"
        raise ValueError(f"--model is {options.model}, the folder of a run, {where}")
    if options.model is not None and Path(options.model).is_file():
        raise ValueError(
            f"--model is {options.model}, a file: give the model's folder or hub id; for random weights --init CONFIG"
        )


def require_at_least(options: Any, least: int, *names: str) -> None:
    """Raises ValueError for an option among `names` that is set and below `least`."""
    for name in names:
        value = getattr(options, name)
        if value is not None and value < least:
            raise ValueError(f"{flag(name)} is {value}; give at least {least}")


def require_token_cap(options: Any) -> None:
    """Raises ValueError for a `token_cap` too small for any sample."""
    if options.token_cap is not None and options.token_cap < 2:
        raise ValueError(f"--token-cap is {options.token_cap}; give at least 2: one token to predict and one before it")


def require_seed(options: Any) -> None:
    """Raises ValueError for a `seed` that torch can't take."""
    if not -(2**63) <= options.seed < 2**63:
        raise ValueError(f"--seed is {options.seed}; it must fit in 64 bits: give one from -2**63 to 2**63 - 1")


def require_ranks(ranks: int) -> None:
    """Raises ValueError for no ranks, and for more than this process's cores can start in reasonable time."""
    cores = len(os.sched_getaffinity(0))
    if ranks < 1:
        raise ValueError(f"--ranks is {ranks}; give at least 1")
    if ranks > RANKS_PER_CORE * cores:
        raise ValueError(
            f"--ranks is {ranks} and there {'is 1 core' if cores == 1 else f'are {cores} cores'} here: give at most "
            f"{RANKS_PER_CORE * cores}, {RANKS_PER_CORE} for each"
        )


def require_files(options: Any, *names: str, or_folders: bool = False) -> None:
    """Raises ValueError for an option among `names` that is set and is not a file."""
    for name in names:
        path = getattr(options, name)
        if path is not None and not (Path(path).exists() if or_folders else Path(path).is_file()):
            raise ValueError(f"{flag(name)} is {path}: there is no such file")


def require_writable(option: str, folder: str | os.PathLike) -> None:
    """Raises ValueError if nothing could be written into the folder, which need not exist. `option`: that named it."""
    path = Path(folder).absolute()
    nearest = next(each for each in (path, *path.parents) if os.path.exists(each))
    which = "which" if nearest == path else f"and {nearest}"
    if not nearest.is_dir():
        raise ValueError(f"{option} is {folder}, {which} is a file: give a folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ValueError(f"{option} is {folder}, {which} can't be written to: give another folder")


class Parser(argparse.ArgumentParser):
    """Takes no shortened names: `--rank 2` would be --ranks, and `--max 1` --max-skipped."""

    def __init__(self, *args: Any, **how: Any) -> None:
        super().__init__(*args, **how, allow_abbrev=False)


def add_arguments(parser: argparse.ArgumentParser, kind: type, *, config: bool = False) -> None:
    """One `--name` per field of the dataclass `kind`, with its help (`metadata["help"]`), choices and default.

    Fields may be int, float, str, bool (`--name/--no-name`), a Literal of strings, or one of these or None; or a tuple
    of one of them but bool, whose argument is repeated. `config` adds `--config FILE`.
    """
    hints = typing.get_type_hints(kind)
    named = " ".join(action.metavar or action.dest for action in parser._get_positional_actions())
    parser.usage = f"%(prog)s {named}{' ' if named else ''}--NAME VALUE …  (--help lists the names)"  # they are many
    groups = {None: parser.add_argument_group(kind.__doc__.strip().splitlines()[0].rstrip("."))}
    group = groups[None]
    if config:
        group.add_argument("--config", metavar="FILE", help="YAML file of these options; the command line overrides it")
    for entry in fields(kind):
        text, title = entry.metadata["help"], entry.metadata["group"]
        if title is not None:
            group = groups.get(title) or groups.setdefault(title, parser.add_argument_group(title))
        if is_required(entry):
            text += " (required)"
        elif entry.default not in (None, ()):
            text += f" (default: {_in_words(entry.default)})"
        if entry.name in getattr(kind, "hidden", ()):  # it is parsed, as its refusal says more than "unrecognized"
            text = argparse.SUPPRESS
        settings: dict[str, Any] = {"help": text.replace("%", "%%"), "default": argparse.SUPPRESS}
        group.add_argument(flag(entry.name), **settings, **_how(hints[entry.name]))
    for once, name in former_names(kind).items():
        hidden = {"dest": name, "help": argparse.SUPPRESS, "default": argparse.SUPPRESS}
        parser.add_argument(flag(once), **hidden, **_how(hints[name]))


def _in_words(default: Any) -> str:
    return {True: "yes", False: "no"}[default] if isinstance(default, bool) else str(default)


def _how(hint: Any) -> dict[str, Any]:
    """argparse's settings for a field's type."""
    hint = without_none(hint)
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    if typing.get_origin(hint) is tuple:
        return _how(typing.get_args(hint)[0]) | {"action": "append"}
    if typing.get_origin(hint) is typing.Literal:
        return {"choices": typing.get_args(hint)}
    return {"type": hint, "metavar": _METAVARS[hint]}


def flag(name: str) -> str:
    """The option as written on the command line."""
    return "--" + name.replace("_", "-")


def is_required(entry: Field) -> bool:
    return entry.default is MISSING and entry.default_factory is MISSING


def without_none(hint: Any) -> Any:
    """The type of an option that may also be None."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return next(part for part in typing.get_args(hint) if part is not type(None))
    return hint


def read_options(kind: type[Options], given: dict[str, Any]) -> Options:
    """The dataclass from parsed arguments; missing ones take their defaults.

    Raises ValueError for missing required options; the dataclass's own checks may raise too.
    """
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    if missing := [flag(entry.name) for entry in fields(kind) if is_required(entry) and entry.name not in given]:
        raise ValueError(f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing")
    return kind(**{entry.name: given[entry.name] for entry in fields(kind) if entry.name in given})
