"""The `odc-triton` command."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from ... import __version__
from ...base.environment import joined_world, require_world
from ...base.errors import TRACEBACK, in_a_line
from ...jobs.options.config_file import with_config
from ...jobs.options.names import by_another_name, instead
from ...jobs.options.options import (
    RANKS_PER_CORE,
    Parser,
    add_arguments,
    expanded,
    read_options,
    require_ranks,
    require_token_cap,
    require_writable,
)
from .start import default_ranks, ending_at_once, report_stopped, start_job


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
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
        return report_stopped(getattr(stop, "signal", signal.SIGINT))  # the launcher's has the signal
    except BrokenPipeError:  # `odc-triton doctor | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the interpreter's last flush is quiet
        return 141
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        text, mark, trace = in_a_line(error).partition(TRACEBACK)
        print(f"{mark}{trace}\nodc-triton: {text}".lstrip(), file=sys.stderr)  # what it comes to is the last line
        return 1


def make_parser(only: str | None = None) -> argparse.ArgumentParser:
    """The parser of the command with all of its subcommands. `only`: one of them; the others get no options."""
    parser = Parser(
        prog="odc-triton", description="Sharded LLM training by on-demand communication: no barrier per layer."
    )
    parser.add_argument("--version", action="version", version=f"odc-triton {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    adds = {
        "demo": _add_demo,
        "run": _add_run,
        "new": _add_new,
        "train": _add_train,
        "data": _add_data,
        "sweep": _SWEEP,
        "export": _EXPORT,
        "bench": _BENCH,
        "simulate": _SIMULATE,
        "profile": _PROFILE,
        "tune": _TUNE,
        "doctor": _add_doctor,
    }
    for name, add in adds.items():
        if only in adds and only != name:  # its options' module may import much
            commands.add_parser(name)
        elif isinstance(add, _Command):
            add.add(commands, name)
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
    """`parser` and the parsers of its subcommands, recursively."""
    inner = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return [parser, *(found for each in inner for child in each.choices.values() for found in _commands(child))]


def _names(parser: argparse.ArgumentParser, given: Sequence[str]) -> bool:
    """True if the arguments begin with the words of this command."""
    words = parser.prog.split()[1:]
    return [*given[: len(words)]] == words


def _did_you_mean(
    unknown: Sequence[str], chosen: argparse.ArgumentParser, commands: Sequence[argparse.ArgumentParser]
) -> str:
    """Suggestions for mistyped options, or the commands that have them."""
    hints = []
    for word in [word.partition("=")[0] for word in unknown if word.startswith("--")]:
        if found := by_another_name(word, chosen._option_string_actions):
            hints.append(found)
        elif others := [each.prog for each in commands if word in each._option_string_actions]:
            hints.append(f"; {word} is of {', '.join(others)}, not of {chosen.prog}")
        else:
            hints.append(instead(word, chosen._option_string_actions))
    return "".join(hints)


def _add_demo(commands: argparse._SubParsersAction) -> None:
    demo = commands.add_parser(
        "demo",
        help="train a small model by FSDP2 and by ODC, side by side",
        description="Trains a small model on the text of Python's standard library, as samples of unequal lengths, by "
        "FSDP2 and ODC in two settings each, side by side. Takes about five minutes on two cores. Writes report.html, "
        "timeline.png, trace.json and report.json.",
    )
    text = "folder to write to (default: out/demo)"
    demo.add_argument("--out", type=expanded, metavar="TEXT", default="out/demo", help=text)
    demo.set_defaults(run=_demo)


def _demo(options: argparse.Namespace) -> int:
    require_writable("--out", options.out)
    from odc_bench.demo import main as train_in_four_ways

    return train_in_four_ways(Path(options.out))


@dataclass(frozen=True, kw_only=True)
class _Command:
    """A command whose options are the fields of a dataclass, passed to `run`."""

    help: str
    description: str
    options: str  # "module:name" of the dataclass
    run: str | Callable[..., int]  # or "module:name" of it
    has_ranks: bool = False  # passed to `run` before the options
    joins: bool = False  # under torchrun it is one of its ranks
    has_config: bool = False  # the options may come from a file
    place: tuple[str, str] | None = None  # a positional argument, and its help; passed to `run` before all else

    def add(self, commands: argparse._SubParsersAction, name: str) -> None:
        parser = commands.add_parser(name, help=self.help, description=self.description)
        kind = _imported(self.options)
        if self.place is not None:
            parser.add_argument(self.place[0], metavar=self.place[0].upper(), help=self.place[1])
        if self.has_ranks:
            text = f"processes to start on this machine, at most {RANKS_PER_CORE} per core (default: one per GPU)"
            parser.add_argument("--ranks", type=int, metavar="N", default=argparse.SUPPRESS, help=text)
        add_arguments(parser, kind, config=self.has_config)

        def called(options: argparse.Namespace) -> int:
            given = vars(options)
            try:
                if self.has_config:
                    given = with_config(kind, given)
                if self.joins and (world := joined_world()) is not None:
                    require_world(given.get("ranks"), world)
                elif self.has_ranks:
                    given.setdefault("ranks", default_ranks(given.get("device", "auto")))
                    require_ranks(given["ranks"])
                wanted = read_options(kind, given)
            except ValueError as error:
                parser.error(str(error))
            first = [given[self.place[0]]] if self.place else []
            first += [given.get("ranks")] if self.has_ranks else []
            return (_imported(self.run) if isinstance(self.run, str) else self.run)(*first, wanted)

        parser.set_defaults(run=called)


def _imported(name: str) -> Any:
    module, _, own = name.partition(":")
    return getattr(import_module(module, __package__), own)


def _train(job: str, ranks: int, wanted: Any) -> int:
    from ...jobs.train.first_look import is_over

    if joined_world() is not None or not is_over(wanted, ranks):
        start_job(f"odc_triton.jobs.train.{job}", f"run_{job}", wanted, ranks=ranks)
    return 0


def _sweep(file: str, ranks: int, wanted: Any) -> int:
    from ...jobs.train.sweep_options import read_sweep

    start_job("odc_triton.jobs.train.sweep", "run_sweep", read_sweep(expanded(file), wanted), ranks=ranks)
    return 0


def _export(checkpoint: str, wanted: Any) -> int:
    from .export import export

    print(f"{wanted.out} has the model of {export(checkpoint, wanted)}")
    if wanted.push_to_hub is not None:
        from ...jobs.train.push import push_folder

        push_folder(Path(wanted.out), wanted.push_to_hub, private=wanted.hub_private)
    return 0


def _profile(ranks: int, wanted: Any) -> int:
    from ...jobs.launcher.launch import launch
    from ..profile import report, run_profile

    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else torch's profiler says on stderr that it starts and stops
    print(report(wanted, launch(run_profile, wanted, ranks=ranks)))
    return 0


def _tune(ranks: int, wanted: Any) -> int:
    from ...jobs.launcher.launch import launch
    from ..tune import run_tune

    print(launch(run_tune, wanted, ranks=ranks)[0])
    return 0


_BENCH = _Command(
    help="measure FSDP2, DDP and ODC on your sequence lengths",
    description="Trains a model on random tokens of the given lengths by FSDP2 in three settings, DDP, ODC with a "
    "barrier per layer, ODC, and ODC that splits long sequences. They take turns over several rounds, one at a time in "
    "the GPUs' memory. Prints tokens/s, MFU, memory, idle share, speed over the fastest baseline, and what gained it.",
    options=".bench:BenchOptions",
    run="odc_bench.suites.lengths:main",
    has_ranks=True,
)
_SFT = "Supervised fine-tuning of a transformers causal LM on packed sequences"
_GRPO = "Reinforcement learning of a transformers causal LM by GRPO: "
_GRPO += "completions of your prompts, rewarded by your functions"
_PAIRS = ", of a transformers causal LM: pairs of a chosen and a rejected text or conversation, packed"
_STARTS = "Starts the ranks on this machine, or joins those of torchrun"
_JOBS = (  # module, its options, help, and description: of pairs the help, and more
    ("sft", "sft_options:SftOptions", "supervised fine-tuning on packed sequences", _SFT),
    ("pairs", "pairs_options:DpoOptions", "preference pairs by DPO, against the model at the start", ""),
    ("pairs", "pairs_options:OrpoOptions", "preference pairs by ORPO, without a reference model", ""),
    ("pairs", "pairs_options:RewardOptions", "a reward model from preference pairs", ""),
    ("grpo", "grpo_options:GrpoOptions", "reinforcement learning by GRPO", _GRPO),
)
_SWEEP = _Command(
    help="many runs with adapters over one frozen base, each at its own pace",
    description="Runs of `train sft` with adapters, from a YAML file of options with lists or rows. Ranks share one "
    "copy of the base; a free rank takes the next run, the costliest first. Each run has a folder as `train sft` makes "
    "it; the table and chart of all are in sweep.html. docs/many_runs.md has an example.",
    options="...jobs.train.sweep_options:SweepOptions",
    run=_sweep,
    has_ranks=True,
    joins=True,
    place=("file", "a YAML file: options of `train sft` that all runs have, and `grid` or `runs`"),
)
_EXPORT = _Command(
    help="write a checkpoint as a folder that transformers loads",
    description="Writes a checkpoint's model, config, generation config and tokenizer into a Hugging Face folder. For "
    "a run with --lora-rank it writes the adapters, for PEFT, or the whole model with --merge.",
    options=".export:ExportOptions",
    run=_export,
    place=("checkpoint", "a step-… folder; or its parent, or the run's folder: the newest in there"),
)
_PROFILE = _Command(
    help="show where the time of a few minibatches goes",
    description="Trains a few minibatches of random tokens under torch's profiler and prints where the time went; "
    "writes profile.json, timeline.png and traces for Perfetto.",
    options="..profile:ProfileOptions",
    run=_profile,
    has_ranks=True,
)
_TUNE = _Command(
    help="find the fastest way to run each layer on this machine",
    description="Measures backends, sources of weights and tiles for a model's shapes on this machine's ranks. Writes "
    "a table for this processor, its links, ranks and versions, which the layers of replace_layers then use.",
    options="..tune:TuneOptions",
    run=_tune,
    has_ranks=True,
)
_SIMULATE = _Command(
    help="predict step times for your sequence lengths, without a GPU",
    description="Predicts step time and speed-up of every schedule and balance for given sequence lengths, a model and "
    "GPUs, and sorts them by speed. Needs no GPU. docs/simulator.md says how.",
    options="..simulate.predict:SimulateOptions",
    run="..simulate.predict:main",
)


def _add_train(commands: argparse._SubParsersAction) -> None:
    jobs = commands.add_parser("train", help="train a model").add_subparsers(dest="job", required=True, metavar="JOB")
    for module, options, text, description in _JOBS:
        kind = f"...jobs.train.{options}"
        name = _imported(kind).job
        more = ": torchrun --nproc-per-node 8 --no-python odc-triton train sft …" if name == "sft" else "."
        about = f"{description or text.capitalize() + _PAIRS}. {_STARTS}"
        run = partial(_train, module)
        how = {"options": kind, "run": run}
        job = _Command(help=text, description=about + more, has_ranks=True, joins=True, has_config=True, **how)
        job.add(jobs, name)


def _add_new(commands: argparse._SubParsersAction) -> None:
    new = commands.add_parser("new", help="write a YAML file for a first run, with what each option means")
    new.add_argument("job", choices=("sft", "grpo", "dpo"), help="what the file is for: `odc-triton train JOB`")
    new.add_argument("file", nargs="?", metavar="FILE", help="file to write, not there yet (default: JOB.yaml)")
    new.set_defaults(run=lambda options: import_module(".new", __package__).main(options))


def _add_data(commands: argparse._SubParsersAction) -> None:
    data = commands.add_parser("data", help="inspect training data")
    jobs = data.add_subparsers(dest="job", required=True, metavar="JOB")
    inspect = jobs.add_parser(
        "inspect",
        help="show a data file's lengths, truncated and dropped samples, and one sample with its targets marked",
        description="Reads whole data files as training would, prints their form, the lengths of their samples, how "
        "many would be truncated or dropped, what train sft --share-prefixes would save, one sample with its targets "
        "marked, and each file's share of an epoch. Needs no GPU and no model. The exit status is 1 if the data has "
        "tokens that --model lacks.",
    )
    inspect.add_argument(
        "files",
        type=expanded,
        nargs="+",
        metavar="FILE",
        help="a file (JSON lines, JSON, Parquet, CSV, Arrow), a folder or a hub id",
    )
    inspect.add_argument(
        "--data-weight", type=float, action="append", default=[], help="weight of each file, as in training; repeatable"
    )
    inspect.add_argument("--tokenizer", type=expanded, required=True, help="folder, hub id or file (required)")
    inspect.add_argument(
        "--model", type=expanded, help="config.json, folder or hub id of a model: names the token ids that it lacks"
    )
    inspect.add_argument("--map", action="append", default=[], help="NAME=COLUMN, as in training; repeatable")
    inspect.add_argument("--chat-template", type=expanded, help="jinja file or name, as in training")
    inspect.add_argument("--token-cap", type=int, default=4096, help="most tokens in a sample (default: 4096)")
    inspect.add_argument("--fetch-images", action="store_true", help="fetch images that are on the network")
    for action in inspect._actions:  # as add_arguments has them
        action.metavar = action.metavar or {expanded: "TEXT", None: "TEXT", float: "X", int: "N"}.get(action.type)
    inspect.set_defaults(run=_inspect_data)


def _inspect_data(options: argparse.Namespace) -> int:
    from .inspection import main as inspect

    require_token_cap(options)
    return inspect(options)


def _add_run(commands: argparse._SubParsersAction) -> None:
    from ...jobs.launcher import program

    run = commands.add_parser(
        "run",
        help="run a training program that uses FSDP2, by on-demand communication",
        description="Starts ranks on this machine by torchrun, or is one of its ranks, and runs a program without a "
        "change to it: models that it has sharded by torch's fully_shard train by on-demand communication. With "
        "another launcher put `-m odc_triton.run` before the program: accelerate launch -m odc_triton.run train.py …",
    )
    run.add_argument("--ranks", type=int, metavar="N", help="processes to start (default: one per GPU)")
    program.add_arguments(run)
    run.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from ...jobs.launcher.program import words_of

    script = Path(options.script)
    if not (options.module or script.is_file() or (script / "__main__.py").is_file()):
        raise ValueError(f"there is no file {options.script}: give a Python program, or -m and a module's name")
    if "--ranks" in options.arguments and options.ranks is None:
        print("odc-triton: --ranks is after the program and goes to it; ranks are chosen before it", file=sys.stderr)
    command = [sys.executable, "-m", "odc_triton.run"]
    if (world := joined_world()) is not None:
        require_world(options.ranks, world)
    else:
        require_ranks(ranks := default_ranks() if options.ranks is None else options.ranks)
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does, which says so at length
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m", "odc_triton.run"]
        command[1:] = launcher
    os.execv(sys.executable, [*command, *words_of(options)])


def _add_doctor(commands: argparse._SubParsersAction) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="find what would keep ranks from training on this machine",
        description="Checks versions, the GPUs and their links, and trains a small model on two ranks. The exit "
        "status is 1 if there is a problem.",
    )
    doctor.set_defaults(run=_doctor)


def _doctor(_: argparse.Namespace) -> int:
    from ..doctor import main as examine

    return examine()
