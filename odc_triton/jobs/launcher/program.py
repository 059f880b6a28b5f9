"""Runs a program in this process, as `python` would, and lets its FSDP2 models train by on-demand communication."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from datetime import timedelta
from pathlib import Path

from .launch import die_with_torchrun

_STRICT = "an error if a model stays on plain FSDP2, or if none was trained by on-demand communication"
_EAGER = "sum gradients in the backward in which FSDP2 would, for programs whose hooks need them there"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of `python -m odc_triton.run` and `odc-triton run`."""
    parser.add_argument("--strict", action="store_true", help=_STRICT)
    parser.add_argument("--eager", action="store_true", help=_EAGER)
    text = "most minutes to wait for a rank that is alive (default: 30)"
    parser.add_argument("--timeout-minutes", type=minutes, default=30.0, metavar="MINUTES", help=text)
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument("script", metavar="SCRIPT", help="the program")
    parser.add_argument("arguments", metavar="…", nargs=argparse.REMAINDER, help="its arguments")


def minutes(text: str) -> float:
    value = float(text)
    if not 0 < value <= 60 * 24 * 365:
        raise argparse.ArgumentTypeError(f"it is {text}; give more than 0 and at most a year")
    return value


def words_of(options: argparse.Namespace) -> list[str]:
    """The command line of these options."""
    flags = {"--strict": options.strict, "--eager": options.eager}
    given = [*(flag for flag, on in flags.items() if on), f"--timeout-minutes={options.timeout_minutes:g}"]
    return [*given, *(["-m"] if options.module else []), options.script, *options.arguments]


def run_program(options: argparse.Namespace) -> None:
    """Runs it as this process's `__main__`."""
    die_with_torchrun()
    from ...fsdp2.unmodified import Unmodified, say

    sys.argv = [options.script, *options.arguments]
    ended: SystemExit | None = None
    how = {"eager": options.eager, "strict": options.strict, "timeout": timedelta(minutes=options.timeout_minutes)}
    with Unmodified(**how) as report:
        try:
            if options.module:
                runpy.run_module(options.script, run_name="__main__", alter_sys=True)
            else:
                sys.path[0] = str(Path(options.script).resolve().parent)  # `-m` has put the working folder there
                runpy.run_path(os.path.abspath(options.script), run_name="__main__")
        except SystemExit as end:
            ended = end
    say(report)
    if ended is not None and ended.code:
        raise ended
    if options.strict and not report.has_trained:
        sys.exit("odc-triton: nothing was trained by on-demand communication, as --strict wants")
    if ended is not None:
        raise ended
