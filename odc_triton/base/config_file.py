"""A run's options in a YAML file: read with the checks of the command line, and written beside the run's output."""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from .files import write_file
from .options import add_arguments, flag


class _FileParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def read_config(path: str | os.PathLike, kind: type, **others: type) -> dict[str, Any]:
    """The options in the file `path`, by the names of the fields of the dataclass `kind`, and of `others`.

    Keys are the options' names, `token-cap` or `token_cap`; values are read as if they were on the command line. A null
    counts as missing. Raises ValueError for a file that can't be read, and for what the command line refuses.
    """
    parser = _FileParser(add_help=False, allow_abbrev=False)
    add_arguments(parser, kind)
    for name, hint in others.items():
        parser.add_argument(flag(name), type=hint, default=argparse.SUPPRESS)
    words = []
    for key, value in _pairs(path):
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, bool):
                words.append(flag(f"{'' if each else 'no_'}{key}"))
            elif each is not None:
                words.append(f"{flag(str(key))}={each}")
    try:
        return vars(parser.parse_args(words))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def written_options(path: str | os.PathLike) -> dict[str, Any]:
    """The options that `write_config` wrote, by field name, unchecked. Raises ValueError if they can't be read."""
    return {str(key).replace("-", "_"): value for key, value in _pairs(path)}


def with_config(kind: type, given: dict[str, Any]) -> dict[str, Any]:
    """Parsed arguments, completed by those of the `--config` file if any, which may also have `ranks`.

    An argument also replaces its alternatives in the file: `--steps` replaces `epochs`.
    """
    path = given.get("config")
    if path is None:
        return given
    found = read_config(path, kind, ranks=int)
    taken = {name for pair in getattr(kind, "alternatives", ()) if {*pair} & given.keys() for name in pair}
    return {name: value for name, value in found.items() if name not in taken} | given


def _pairs(path: str | os.PathLike) -> list[tuple[Any, Any]]:
    import yaml

    try:
        text = Path(path).read_text(encoding="utf-8")
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
        values = yaml.safe_load(text)
    except OSError as error:
        raise ValueError(f"{path} can't be read ({error.strerror}): give a file of options to --config") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} has no options: give lines such as 'token-cap: 4096'")
    keys = [str(node.value).replace("-", "_") for node, _ in tree.value]
    if twice := next((key for key in keys if keys.count(key) > 1), None):
        raise ValueError(f"{path}: {_key(twice)} appears twice; keep one")
    return list(values.items())


def _key(name: str) -> str:
    return flag(name).removeprefix("--")


def write_config(path: str | os.PathLike, options: Any, *, comment: str, **others: Any) -> None:
    """Writes the dataclass `options`, and `others`, for `read_config`, without those that are None."""
    import yaml

    values = {_key(name): value for name, value in (others | asdict(options)).items() if value is not None}
    lists = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
    text = yaml.safe_dump(lists, sort_keys=False, allow_unicode=True)
    write_file(path, f"# {comment}\n{text}".encode())
