"""The `odc-triton` command."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from .profile import ProfileOptions
    from .train.options import SftOptions
    from .tune import TuneOptions

Options = TypeVar("Options")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    if not sys.platform.startswith("linux"):
        print(f"odc-triton runs on Linux only, not on {sys.platform}", file=sys.stderr)
        return 1
    parser = argparse.ArgumentParser(
        prog="odc-triton", description="Sharded training by on-demand communication: no barrier per layer."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_demo(commands)
    _add_train(commands)
    _add_profile(commands)
    _add_tune(commands)
    _add_doctor(commands)
    _add_simulate(commands)
    options = parser.parse_args(arguments)
    try:
        status = options.run(options)
        sys.stdout.flush()  # here, so that a closed pipe is met below, not at the interpreter's end
        return status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `odc-triton doctor | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the interpreter's last flush is quiet
        return 141
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        print(f"odc-triton: {error}", file=sys.stderr)
        return 1


def _add_demo(commands: argparse._SubParsersAction) -> None:
    demo = commands.add_parser(
        "demo",
        help="train one small model in five ways side by side, FSDP2's and ours, and draw what the ranks do",
        description="Trains one small model on this Python's standard library in five ways side by side (about five "
        "minutes on two cores) and writes report.html, timeline.png, trace.json and report.json.",
    )
    demo.add_argument("--out", type=Path, default=Path("out/demo"), help="folder to write to (default: out/demo)")
    demo.set_defaults(run=_demo)


def _demo(options: argparse.Namespace) -> int:
    # The baselines are no part of the package: they lie in the repository's bench/, beside it.
    root = Path(__file__).resolve().parent.parent
    if not (root / "bench" / "demo.py").exists():
        raise RuntimeError("the demo needs the repository, whose bench/ holds the baselines: clone it and `make demo`")
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    return importlib.import_module("bench.demo").main(options.out)


def _add_train(commands: argparse._SubParsersAction) -> None:
    from .train.options import SftOptions

    train = commands.add_parser("train", help="train a model")
    jobs = train.add_subparsers(dest="job", required=True, metavar="JOB")
    sft = jobs.add_parser(
        "sft",
        help="supervised fine-tuning on packed sequences",
        description="Supervised fine-tuning of a transformers causal LM on packed sequences. Starts the ranks on this "
        "machine; under torchrun use `torchrun -m odc_triton.train.sft` with the same options.",
    )
    _takes(sft, SftOptions, _train_sft)


def _train_sft(ranks: int, wanted: SftOptions) -> int:
    from .launch import launch
    from .train.sft import run_sft

    launch(run_sft, wanted, ranks=ranks)
    return 0


def _add_profile(commands: argparse._SubParsersAction) -> None:
    from .profile import ProfileOptions

    profile = commands.add_parser(
        "profile",
        help="show where the time of a few minibatches goes",
        description="Trains a few minibatches of random tokens under torch's profiler and prints where the time went; "
        "writes profile.json, timeline.png and traces for Perfetto.",
    )
    _takes(profile, ProfileOptions, _profile)


def _profile(ranks: int, wanted: ProfileOptions) -> int:
    from .launch import launch
    from .profile import report, run_profile

    print(report(wanted, launch(run_profile, wanted, ranks=ranks)))
    return 0


def _add_tune(commands: argparse._SubParsersAction) -> None:
    from .tune import TuneOptions

    tune = commands.add_parser(
        "tune",
        help="measure the ways to run a model's layers on this machine, and keep the fastest",
        description="Measures backends, strategies and tiles for a model's shapes on this machine's ranks and writes a "
        "table, keyed by processor, links, ranks and versions, which the layers of replace_layers then follow.",
    )
    _takes(tune, TuneOptions, _tune)


def _tune(ranks: int, wanted: TuneOptions) -> int:
    from .launch import launch
    from .tune import run_tune

    print(launch(run_tune, wanted, ranks=ranks)[0])
    return 0


def _takes(parser: argparse.ArgumentParser, kind: type[Options], run: Callable[[int, Options], int]) -> None:
    """Has the command take `--ranks` and the fields of the dataclass `kind`, and call `run(ranks, options)`."""
    from .options import add_arguments, read_options

    parser.add_argument("--ranks", type=int, default=1, help="processes to start on this machine (default: 1)")
    add_arguments(parser, kind)

    def called(options: argparse.Namespace) -> int:
        try:
            wanted = read_options(kind, options)
        except ValueError as error:
            parser.error(str(error))
        return run(options.ranks, wanted)

    parser.set_defaults(run=called)


def _add_doctor(commands: argparse._SubParsersAction) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="look for what would keep ranks from training on this machine, with the remedies",
        description="Looks at the GPUs and the links between them, versions, shared memory, TMPDIR and limits. The "
        "exit status is 1 where there is a problem.",
    )
    doctor.add_argument("--json", action="store_true", help="everything that was seen, as JSON")
    doctor.set_defaults(run=_doctor)
    topo = commands.add_parser("topo", help="draw which GPUs reach each other, how fast, and whether they can add")
    topo.set_defaults(run=_topo)


def _doctor(options: argparse.Namespace) -> int:
    from .doctor import main as examine

    return examine(options.json)


def _topo(options: argparse.Namespace) -> int:
    from .doctor import draw_matrix
    from .probe import read_topology

    print(draw_matrix(read_topology()))
    return 0


def _add_simulate(commands: argparse._SubParsersAction) -> None:
    from .options import add_arguments, read_options
    from .simulate.options import SimulateOptions

    simulate = commands.add_parser(
        "simulate",
        help="predict step times of FSDP2 and ODC for your sequence lengths, without a GPU",
        description="Predicts the step time and the speed-up of every schedule and balance for given sequence lengths, "
        "a model and GPUs, and ranks them. Needs no GPU. docs/simulator.md says what is modelled.",
    )
    add_arguments(simulate, SimulateOptions)

    def called(options: argparse.Namespace) -> int:
        from .simulate.command import main as predict

        try:
            wanted = read_options(SimulateOptions, options)
        except ValueError as error:
            simulate.error(str(error))
        return predict(wanted)

    simulate.set_defaults(run=called)


if __name__ == "__main__":
    sys.exit(main())
