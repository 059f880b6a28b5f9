"""A run's options in a YAML file: read with the checks of the command line, and written to the run's folder."""

from __future__ import annotations

import contextlib
import os
import typing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...base.files import write_file
from .names import instead
from .options import expanded, flag, former_names, without_none

Pairs = list[tuple[Any, Any, Any]]
_WANTED = {bool: "true or false", int: "a whole number", float: "a number", str: "text, in quotes"}


def read_config(path: str | os.PathLike, kind: type, **others: type) -> dict[str, Any]:
    """The options in the file `path`, by the names of the fields of the dataclass `kind`, and of `others`.

    Keys are the options' names, `token-cap` or `token_cap`. A null counts as missing. Raises ValueError for a
    file that can't be read, an unknown or repeated key, and a value of another type.
    """
    found = checked_options(path, read_pairs(path), kind, **others)
    return {name: value for name, value in found.items() if value is not None}


def checked_options(where: str | os.PathLike, pairs: Pairs, kind: type, **others: type) -> dict[str, Any]:
    """As `read_config`, of keys and values that `where` has, with those that are null."""
    hints = {name: hint for name, hint in typing.get_type_hints(kind).items() if name in kind.__dataclass_fields__}
    hints |= others
    found: dict[str, Any] = {}
    former = former_names(kind)
    unknown = [str(key) for key, _, _ in pairs if _name(key, former) not in hints]
    if unknown:
        hints_of = (f"{key}{instead(key, [*map(_key, hints)]) or '; --help lists the names'}" for key in unknown)
        raise ValueError(f"{where}: there is no option {'. There is no option '.join(hints_of)}")
    for key, value, text in pairs:
        hint = hints[name := _name(key, former)]
        if name in found:
            raise ValueError(f"{where}: {_key(name)} appears twice; keep one")
        if not isinstance(value, str) and isinstance(text, str):
            if text.lower() in typing.get_args(without_none(hint)):
                value = text.lower()  # YAML takes words for values: off, no, null
            elif typing.get_origin(without_none(hint)) is typing.Literal and value is not None:
                value = text
        found[name] = None if value is None else _value(f"{where}: {key}", value, hint)
    return found


def written_options(path: str | os.PathLike) -> dict[str, Any]:
    """The options that `write_config` wrote, by field name, unchecked. Raises ValueError if they can't be read."""
    return {str(key).replace("-", "_"): value for key, value, _ in read_pairs(path)}


def with_config(kind: type, given: dict[str, Any]) -> dict[str, Any]:
    """Parsed arguments, completed by those of the `--config` file if any, which may also have `ranks`.

    An argument also replaces its alternatives in the file: `--steps` replaces `epochs`.
    """
    path = given.get("config")
    if path is None:
        return given
    return replaced(kind, read_config(expanded(path), kind, ranks=int), given)


def replaced(kind: type, options: dict[str, Any], by: dict[str, Any]) -> dict[str, Any]:
    """`options`, but for those in `by`, which replace their alternatives too."""
    given = {name for name, value in by.items() if value is not None}
    taken = {name for pair in getattr(kind, "alternatives", ()) if {*pair} & given for name in pair}
    return {name: value for name, value in options.items() if name not in taken} | by


def read_pairs(path: str | os.PathLike) -> Pairs:
    """Keys, values, and what the file has for a value that is not a list. Raises ValueError as `read_config`."""
    import yaml

    try:
        text = Path(path).read_text(encoding="utf-8")
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
        values = yaml.safe_load(text)
    except OSError as error:
        raise ValueError(f"{path} can't be read ({error.strerror}): give a file of options") from error
    except (ValueError, RecursionError, yaml.YAMLError) as error:  # also of dates such as 2026-13-01
        raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} has no options: give lines such as 'token-cap: 4096'")
    nodes = [tree]
    for node in nodes:  # all mappings and lists, which are found on the way
        pairs = node.value if node.id == "mapping" else [(None, each) for each in node.value]
        nodes += [each for _, each in pairs if each.id != "scalar" and each not in nodes]
        keys = [str(key.value).replace("-", "_") for key, _ in pairs if key is not None]
        if twice := next((key for key in keys if keys.count(key) > 1), None):
            raise ValueError(f"{path}: {_key(twice)} appears twice; keep one")
    texts = {str(key.value): node.value for key, node in tree.value}
    return [(key, value, texts.get(str(key))) for key, value in values.items()]


def _value(where: str, value: Any, hint: Any) -> Any:
    hint = without_none(hint)
    if typing.get_origin(hint) is tuple:
        each = typing.get_args(hint)[0]
        return [_value(where, part, each) for part in (value if isinstance(value, list) else [value])]
    if typing.get_origin(hint) is typing.Literal:
        if value not in typing.get_args(hint):
            raise ValueError(f"{where} is {value!r}; choose one of {', '.join(typing.get_args(hint))}")
        return value
    if hint is float and type(value) in (int, str):  # YAML takes 1e-5 for text: it wants 1.0e-5
        with contextlib.suppress(ValueError, OverflowError):
            return float(value)
    if type(value) is not hint:
        raise ValueError(f"{where} is {value!r}; give {_WANTED[hint]}")
    return value


def _name(key: Any, former: dict[str, str]) -> str:
    name = str(key).replace("-", "_")
    return former.get(name, name)


def _key(name: str) -> str:
    return flag(name).removeprefix("--")


def write_config(path: str | os.PathLike, options: Any, *, comment: str, **others: Any) -> None:
    """Writes the dataclass `options`, and `others`, for `read_config`, without those that are None."""
    import yaml

    values = {_key(name): value for name, value in (others | asdict(options)).items() if value is not None}
    lists = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
    text = yaml.safe_dump(lists, sort_keys=False, allow_unicode=True)
    write_file(path, f"# {comment}\n{text}".encode())
