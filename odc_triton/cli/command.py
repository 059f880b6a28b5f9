"""The `odc-triton` command."""

from __future__ import annotations

import argparse
import difflib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from .. import __version__
from ..base.errors import in_a_line
from ..base.files import without_empty_cache
from .start import ending_at_once, say_stopped, start_job

if TYPE_CHECKING:
    from ..simulate.predict import SimulateOptions
    from ..train.grpo_options import GrpoOptions
    from ..train.sft_options import SftOptions
    from .bench import BenchOptions
    from .export import ExportOptions
    from .profile import ProfileOptions
    from .tune import TuneOptions

Options = TypeVar("Options")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    with without_empty_cache():
        return _main(arguments)


def _main(arguments: Sequence[str] | None) -> int:
    if not sys.platform.startswith("linux"):
        print(f"odc-triton runs on Linux only, not on {sys.platform}", file=sys.stderr)
        return 1
    with ending_at_once():
        options = _parse(arguments)
    try:
        status = options.run(options)
        sys.stdout.flush()  # here, so that a closed pipe raises below, not when the interpreter exits
        return status
    except KeyboardInterrupt as stop:
        return say_stopped(getattr(stop, "signal", signal.SIGINT))  # the launcher's has the signal
    except BrokenPipeError:  # `odc-triton doctor | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the interpreter's last flush is quiet
        return 141
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        print(f"odc-triton: {in_a_line(error)}", file=sys.stderr)
        return 1


def make_parser(only: str | None = None) -> argparse.ArgumentParser:
    """The parser of the command with all of its subcommands. `only`: one of them, of the others just the names."""
    parser = argparse.ArgumentParser(
        prog="odc-triton", description="Sharded training by on-demand communication: no barrier per layer."
    )
    parser.add_argument("--version", action="version", version=f"odc-triton {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    adds = {
        "demo": _add_demo,
        "bench": _add_bench,
        "train": _add_train,
        "data": _add_data,
        "export": _add_export,
        "profile": _add_profile,
        "tune": _add_tune,
        "doctor": _add_doctor,
        "topo": _add_topo,
        "simulate": _add_simulate,
    }
    for name, add in adds.items():
        if only in adds and only != name:  # its options' module may import much
            commands.add_parser(name)
        else:
            add(commands)
    return parser


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    given = sys.argv[1:] if arguments is None else arguments
    options, unknown = make_parser(*given[:1]).parse_known_args(given)
    if unknown:
        commands = _commands(make_parser())
        chosen = max((each for each in commands if _names(each, given)), key=lambda each: len(each.prog))
        chosen.error(f"unrecognized arguments: {' '.join(unknown)}{_did_you_mean(unknown, chosen, commands)}")
    return options


def _commands(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """`parser` and those of its commands, and of theirs."""
    inner = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return [parser, *(found for each in inner for child in each.choices.values() for found in _commands(child))]


def _names(parser: argparse.ArgumentParser, given: Sequence[str]) -> bool:
    """Whether the arguments begin with the words of this command."""
    words = parser.prog.split()[1:]
    return [*given[: len(words)]] == words


def _did_you_mean(
    unknown: Sequence[str], chosen: argparse.ArgumentParser, commands: Sequence[argparse.ArgumentParser]
) -> str:
    """The options that mistyped ones may have meant, or the commands that have them."""
    said = []
    for word in [word.partition("=")[0] for word in unknown if word.startswith("--")]:
        if others := [each.prog for each in commands if word in each._option_string_actions]:
            said.append(f"; {word} is of {', '.join(others)}, not of {chosen.prog}")
        elif close := difflib.get_close_matches(word, sorted(chosen._option_string_actions), n=1):
            said.append(f"; did you mean {close[0]}?")
    return "".join(said)


def _add_demo(commands: argparse._SubParsersAction) -> None:
    demo = commands.add_parser(
        "demo",
        help="train one small model in four ways side by side, FSDP2's and ours, and draw what the ranks do",
        description="Trains one small model on this Python's standard library, cut into samples of unequal lengths, in "
        "four ways side by side (about five minutes on two cores) and writes report.html, timeline.png, trace.json and "
        "report.json.",
    )
    demo.add_argument("--out", type=Path, default=Path("out/demo"), help="folder to write to (default: out/demo)")
    demo.set_defaults(run=_demo)


def _demo(options: argparse.Namespace) -> int:
    if options.out.exists() and not options.out.is_dir():
        raise ValueError(f"--out is {options.out}, which is a file: give a folder")
    from odc_bench.demo import main as train_in_four_ways

    return train_in_four_ways(options.out)


def _add_bench(commands: argparse._SubParsersAction) -> None:
    from .bench import BenchOptions

    bench = commands.add_parser(
        "bench",
        help="train in all ways, FSDP2's, DDP's and ours, on your sequence lengths: speed, memory, idle time",
        description="Trains a model on random tokens of the given lengths by FSDP2 in three settings, DDP, our "
        "transport with a barrier per layer, and ODC. They take turns over several rounds, one at a time in the GPUs' "
        "memory. Prints tokens/s, MFU, memory, idle share and the speed relative to the fastest baseline.",
    )
    _takes_ranks(bench, BenchOptions, _bench)


def _bench(ranks: int, wanted: BenchOptions) -> int:
    from odc_bench.suites.lengths import main as compare

    return compare(ranks, wanted)


def _add_train(commands: argparse._SubParsersAction) -> None:
    from ..train.grpo_options import GrpoOptions
    from ..train.sft_options import SftOptions

    train = commands.add_parser("train", help="train a model")
    jobs = train.add_subparsers(dest="job", required=True, metavar="JOB")
    sft = jobs.add_parser(
        "sft",
        help="supervised fine-tuning on packed sequences",
        description="Supervised fine-tuning of a transformers causal LM on packed sequences. Starts the ranks on this "
        "machine; under torchrun use `torchrun -m odc_triton.train.sft` with the same options.",
    )
    _takes_ranks(sft, SftOptions, _train_sft, config=True)
    grpo = jobs.add_parser(
        "grpo",
        help="reinforcement learning by GRPO",
        description="Reinforcement learning of a transformers causal LM by GRPO: completions of your prompts, rewarded "
        "by your functions. Starts the ranks on this machine; under torchrun use `torchrun -m odc_triton.train.grpo` "
        "with the same options.",
    )
    _takes_ranks(grpo, GrpoOptions, _train_grpo, config=True)


def _train_sft(ranks: int, wanted: SftOptions) -> int:
    start_job("odc_triton.train.sft", "run_sft", wanted, ranks=ranks)
    return 0


def _train_grpo(ranks: int, wanted: GrpoOptions) -> int:
    start_job("odc_triton.train.grpo", "run_grpo", wanted, ranks=ranks)
    return 0


def _add_data(commands: argparse._SubParsersAction) -> None:
    data = commands.add_parser("data", help="look at training data")
    jobs = data.add_subparsers(dest="job", required=True, metavar="JOB")
    inspect = jobs.add_parser(
        "inspect",
        help="show what a data file holds: lengths, what would be cut or dropped, one sample with its targets marked",
        description="Reads whole data files as training would, prints their form, how long their samples are, what "
        "would be truncated or dropped, one sample with its targets marked, and what an epoch takes of several files. "
        "Needs no GPU and no model. The exit status is 1 if the data has tokens that --model lacks.",
    )
    inspect.add_argument(
        "files", nargs="+", metavar="FILE", help="a file (JSON lines, JSON, Parquet, CSV, Arrow), a folder or a hub id"
    )
    inspect.add_argument(
        "--data-weight", type=float, action="append", default=[], help="weight of each file, as in training; repeatable"
    )
    inspect.add_argument("--tokenizer", help="folder, hub id or tokenizer.json (default: lengths in bytes of UTF-8)")
    inspect.add_argument("--model", help="config.json, folder or hub id of a model: names the token ids that it lacks")
    inspect.add_argument("--token-cap", type=int, default=4096, help="longest sample, in tokens (default: 4096)")
    inspect.add_argument("--out", type=Path, help="file for a picture of the lengths (.png)")
    inspect.add_argument("--json", action="store_true", help="print everything as JSON")
    inspect.set_defaults(run=_inspect_data)


def _inspect_data(options: argparse.Namespace) -> int:
    from ..data.inspection import main as inspect

    text, fits = inspect(
        options.files,
        weights=options.data_weight,
        tokenizer=options.tokenizer,
        model=options.model,
        token_cap=options.token_cap,
        picture=options.out,
        as_json=options.json,
    )
    print(text)
    return 0 if fits else 1


def _add_export(commands: argparse._SubParsersAction) -> None:
    from .export import ExportOptions

    export = commands.add_parser(
        "export",
        help="write a checkpoint of a run as a folder that plain transformers loads",
        description="Writes a checkpoint's model, config, generation config and tokenizer into a Hugging Face folder. "
        "For a run with --lora-rank it writes the adapters, for PEFT, or the whole model with --merge.",
    )
    export.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="a step-… folder, or a folder of them or a run's folder, for the newest one",
    )
    _takes(export, ExportOptions, _export, checkpoint=None)


def _export(checkpoint: str, wanted: ExportOptions) -> int:
    from .export import export

    print(f"{export(checkpoint, wanted)} is in {wanted.out}")
    return 0


def _add_profile(commands: argparse._SubParsersAction) -> None:
    from .profile import ProfileOptions

    profile = commands.add_parser(
        "profile",
        help="show where the time of a few minibatches goes",
        description="Trains a few minibatches of random tokens under torch's profiler and prints where the time went; "
        "writes profile.json, timeline.png and traces for Perfetto.",
    )
    _takes_ranks(profile, ProfileOptions, _profile)


def _profile(ranks: int, wanted: ProfileOptions) -> int:
    from ..comm.launch import launch
    from .profile import report, run_profile

    print(report(wanted, launch(run_profile, wanted, ranks=ranks)))
    return 0


def _add_tune(commands: argparse._SubParsersAction) -> None:
    from .tune import TuneOptions

    tune = commands.add_parser(
        "tune",
        help="measure the ways to run a model's layers on this machine, and keep the fastest",
        description="Measures backends, strategies and tiles for a model's shapes on this machine's ranks. Writes a "
        "table, keyed by processor, links, ranks and versions, that the layers of replace_layers then follow.",
    )
    _takes_ranks(tune, TuneOptions, _tune)


def _tune(ranks: int, wanted: TuneOptions) -> int:
    from ..comm.launch import launch
    from .tune import run_tune

    print(launch(run_tune, wanted, ranks=ranks)[0])
    return 0


def _takes(
    parser: argparse.ArgumentParser,
    kind: type[Options],
    run: Callable[..., int],
    *,
    config: bool = False,
    **others: Any,
) -> None:
    """Adds the fields of the dataclass `kind` to the command, which then calls `run`.

    `run` gets the arguments that `others` names, which the command already has, with their defaults; then the options.
    `config`: they may come from a file.
    """
    from ..base.config_file import with_config
    from ..base.options import add_arguments, read_options, require_ranks

    add_arguments(parser, kind, config=config)

    def called(options: argparse.Namespace) -> int:
        given = vars(options)
        try:
            if config:
                given = with_config(kind, given)
            require_ranks(given.get("ranks", 1))
            wanted = read_options(kind, given)
        except ValueError as error:
            parser.error(str(error))
        return run(*(given.get(name, default) for name, default in others.items()), wanted)

    parser.set_defaults(run=called)


def _takes_ranks(
    parser: argparse.ArgumentParser, kind: type[Options], run: Callable[[int, Options], int], *, config: bool = False
) -> None:
    from ..base.options import RANKS_PER_CORE, whole_number

    text = f"processes to start on this machine, at most {RANKS_PER_CORE} for each core (default: 1)"
    parser.add_argument("--ranks", type=whole_number, metavar="N", default=argparse.SUPPRESS, help=text)
    _takes(parser, kind, run, config=config, ranks=1)


def _add_doctor(commands: argparse._SubParsersAction) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="find what would keep ranks from training on this machine, and say what to do about it",
        description="Looks at versions, the GPUs and what joins them, and lets two ranks share a model. The exit "
        "status is 1 if there is a problem.",
    )
    doctor.add_argument("--json", action="store_true", help="print everything that was found as JSON")
    doctor.set_defaults(run=_doctor)


def _add_topo(commands: argparse._SubParsersAction) -> None:
    topo = commands.add_parser("topo", help="draw which GPUs reach each other, how fast, and whether they can add")
    topo.set_defaults(run=_topo)


def _doctor(options: argparse.Namespace) -> int:
    from .doctor import main as examine

    return examine(options.json)


def _topo(options: argparse.Namespace) -> int:
    from ..machine.probe import read_topology
    from .doctor import draw_matrix

    print(draw_matrix(read_topology()))
    return 0


def _add_simulate(commands: argparse._SubParsersAction) -> None:
    from ..simulate.predict import SimulateOptions

    simulate = commands.add_parser(
        "simulate",
        help="predict step times of FSDP2 and ODC for your sequence lengths, without a GPU",
        description="Predicts step time and speed-up of every schedule and balance for given sequence lengths, a model "
        "and GPUs, and ranks them. Needs no GPU. docs/simulator.md says what is modelled.",
    )
    _takes(simulate, SimulateOptions, _simulate)


def _simulate(wanted: SimulateOptions) -> int:
    from ..simulate.predict import main as predict

    return predict(wanted)
