"""Runs a program whose FSDP2 models train by on-demand communication, without a change to it.

    torchrun --nproc-per-node 8 -m odc_triton.run train.py --its options
    accelerate launch --config_file fsdp2.yaml -m odc_triton.run train.py --its options
    accelerate launch --config_file fsdp2.yaml -m odc_triton.run -m its.module --its options

`odc-triton run` starts the ranks as well. The last line on stderr, of rank 0, says what was trained so.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

_STRICT = "an error if something is not trained so, which otherwise stays on plain FSDP2"
_EAGER = "sum gradients in the backward in which FSDP2 would, for programs whose hooks need them there"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of this module, and of `odc-triton run`."""
    parser.add_argument("--strict", action="store_true", help=_STRICT)
    parser.add_argument("--eager", action="store_true", help=_EAGER)
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument("script", metavar="SCRIPT", help="the program")
    parser.add_argument("arguments", metavar="…", nargs=argparse.REMAINDER, help="its arguments")


def words_of(options: argparse.Namespace) -> list[str]:
    """The command line of these options."""
    flags = {"--strict": options.strict, "--eager": options.eager, "-m": options.module}
    return [*(flag for flag, on in flags.items() if on), options.script, *options.arguments]


def run_program(options: argparse.Namespace) -> None:
    """Runs it as this process's `__main__`."""
    from .fsdp2.unmodified import Unmodified

    sys.argv = [options.script, *options.arguments]
    report = None
    try:
        with Unmodified(eager=options.eager, strict=options.strict) as report:
            if options.module:
                sys.path.insert(0, os.getcwd())
                runpy.run_module(options.script, run_name="__main__", alter_sys=True)
            else:
                sys.path.insert(0, str(Path(options.script).resolve().parent))
                runpy.run_path(options.script, run_name="__main__")
    finally:
        if report is not None and os.environ.get("RANK", "0") == "0":
            print(f"odc-triton run: {report}", file=sys.stderr, flush=True)
    if options.strict and not report.has_trained:
        sys.exit("odc-triton run --strict: nothing was trained by on-demand communication")


def main(arguments: Sequence[str] | None = None) -> None:
    """`python -m odc_triton.run`, on each rank."""
    parser = argparse.ArgumentParser(prog="python -m odc_triton.run", description=__doc__.partition("\n")[0])
    add_arguments(parser)
    run_program(parser.parse_args(arguments))


if __name__ == "__main__":
    main()
