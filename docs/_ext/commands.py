"""Writes docs/commands/, a page per command of `odc-triton`, from the parsers that the command itself uses."""

from __future__ import annotations

import argparse
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from sphinx.application import Sphinx

from odc_triton.tools.cli.command import make_parser

FOLDER = "commands"


def leaves(parser: argparse.ArgumentParser) -> Iterator[tuple[argparse.ArgumentParser, str]]:
    """Every parser without subcommands, in the order of `--help`, and the line that its parent's help has on it."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            lines = {choice.dest: choice.help for choice in action._choices_actions}
            for name, child in action.choices.items():
                below = list(leaves(child))
                yield from below or [(child, lines[name])]


def page(parser: argparse.ArgumentParser, line: str) -> str:
    """The page of one command: what its `--help` says, each option with an anchor."""
    parts = [f"# {parser.prog}", plain(parser.description or f"{line[0].upper()}{line[1:]}.")]
    formatter = parser.formatter_class(parser.prog, width=88)
    formatter.add_usage(parser.usage, parser._actions, parser._mutually_exclusive_groups, prefix="")
    parts.append(f"```text\n{formatter.format_help().partition('  (')[0].strip()}\n```")  # the names are listed below
    parts.append(f"```{{program}} {parser.prog}\n```")
    for group in parser._action_groups:
        shown = [
            action for action in group._group_actions if action.help != argparse.SUPPRESS and action.dest != "help"
        ]
        if shown:
            parts.append(f"## {plain(group.title[0].upper() + group.title[1:])}")
            parts += [described(action, formatter) for action in shown]
    return "\n\n".join(parts) + "\n"


def described(action: argparse.Action, formatter: argparse.HelpFormatter) -> str:
    """One argument and its help, as Sphinx's `option`."""
    if action.option_strings:
        value = "" if action.nargs == 0 else f" {formatter._format_args(action, placeholder(action))}"
        names = ", ".join(f"{name}{value}" for name in action.option_strings)
    else:
        names = placeholder(action)
    return f"```{{option}} {names}\n{plain(formatter._expand_help(action))}\n```"


def placeholder(action: argparse.Action) -> str:
    """What stands for the value: as in `--help`."""
    if action.choices is not None:
        return "{" + ",".join(map(str, action.choices)) + "}"
    return action.metavar or action.dest.upper()


def plain(text: str) -> str:
    """Text as markdown that shows it unchanged, but code within backticks."""
    parts = " ".join(text.split()).split("`")
    parts[::2] = [re.sub(r"([\\*_\[\]<>{}#|~])", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts)


def write_pages(app: Sphinx) -> None:
    """Makes docs/commands/ anew."""
    pages, rows = {}, []
    for parser, line in leaves(make_parser()):
        name = parser.prog.replace(" ", "-")
        pages[name] = page(parser, line)
        rows.append(f"| [{parser.prog}]({name}.md) | {plain(line)} |")
    index = ["# Commands", "What `odc-triton` can do. These pages are made from each command's `--help`."]
    index += ["\n".join(["| | |", "| --- | --- |", *rows])]
    index += ["\n".join(["```{toctree}", ":hidden:", "", *pages, "```"])]
    pages["index"] = "\n\n".join(index) + "\n"
    folder = Path(app.srcdir) / FOLDER
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, text in pages.items():
        (folder / f"{name}.md").write_text(text, encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("builder-inited", write_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
