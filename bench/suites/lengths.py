"""All ways to train, side by side on given lengths of sequences: what `odc-triton bench` runs.

    odc-triton bench --lengths FILE --init CONFIG --ranks 2

Each variant takes its turn in every round, in a separate job, so that it has the memory to itself and running out of it
ends no other variant. In a round all train the same minibatches from the same weights; the next round takes new ones
and begins with another variant. Runs over NCCL if every rank has a GPU, else over gloo on the CPU. The table and
lengths.json are kept up to date while it runs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from odc_triton.base.files import write_file
from odc_triton.jobs.data.lengths import read_lengths
from odc_triton.jobs.data.records import Record
from odc_triton.jobs.launcher.launch import launch
from odc_triton.tools.cli.bench import BenchOptions

from .. import variants
from ..harness import in_turn, single_thread_environment
from ..provenance import about, save_json
from ..variants import Ddp, Fsdp2, Fsdp2Micro, Fsdp2NoReshard, Odc, OdcSplit, Setting, Variant
from .alone import LengthsWork, Turn, take_turn
from .lengths_report import ALIKE, Amounts, Result, as_data, loss_spread, peak_flops, progress, quiet_or_not, text_of

BASELINES = (Fsdp2Micro, Fsdp2, Fsdp2NoReshard, Ddp)
VARIANTS = (*BASELINES, variants.LayerBarrier, variants.OdcMicro, Odc, OdcSplit)
QUICK = (Fsdp2, Fsdp2NoReshard, Odc, OdcSplit)  # the demo's
OTHERS = (variants.Unsharded, variants.Fsdp2SymmetricMemory, variants.Bridged)  # only where they are named

Turns = Callable[[type[Variant], int], Turn]


def setting_of(options: BenchOptions, ranks: int, gpus: int) -> Setting:
    """Where it runs. Raises ValueError for "cuda" with more ranks than GPUs: NCCL allows one rank per GPU."""
    device = options.device
    if device == "auto":
        device = "cuda" if gpus >= ranks else "cpu"
    elif device == "cuda" and gpus < ranks:
        remedy = f"give --ranks {gpus}" if gpus else "give --device cpu"
        raise ValueError(f"--device is cuda with --ranks {ranks}, and there are {gpus or 'no'} GPUs here: {remedy}")
    return Setting(device=device, dtype=options.dtype or ("bf16" if device == "cuda" else "fp32"))


def chosen(names: str | None, *, quick: bool = False) -> tuple[type[Variant], ...]:
    """The variants with those names, in the order of VARIANTS and OTHERS; for None VARIANTS, or QUICK. Raises
    ValueError for an unknown one.
    """
    if names is None:
        return QUICK if quick else VARIANTS
    wanted = [name.strip() for name in names.split(",")]
    kinds = (*VARIANTS, *OTHERS)
    known = [kind.name for kind in kinds]
    for name in wanted:
        if name not in known:
            raise ValueError(f"variants has {name!r}; choose from {', '.join(map(repr, known))}")
    return tuple(kind for kind in kinds if kind.name in wanted)


def work_of(options: BenchOptions, ranks: int, setting: Setting) -> tuple[LengthsWork, int]:
    """What to train on, and how many of the file's sequences were cut off at the token cap."""
    lengths = read_lengths(options.lengths, count_tokens=_counter(options.tokenizer or options.model))
    cap = options.token_cap or max(lengths)
    work = LengthsWork.drawn(
        [min(length, cap) for length in lengths],
        samples=options.samples_per_rank * ranks,
        rounds=options.rounds,
        timed=options.minibatches,
        seed=options.seed,
        model=options.model,
        init=options.init,
        token_cap=cap,
        gradient_checkpointing=options.gradient_checkpointing,
        drawn_on=setting.device if ranks == 1 else "cpu",  # several ranks' GPUs need not hold the whole
    )
    return work, sum(length > cap for length in lengths)


def _counter(source: str | None) -> Callable[[Record], int] | None:
    """Counts a text's tokens as training would; loads the tokenizer for the first text."""
    if source is None:
        return None
    encoders: list = []

    def count(record: Record) -> int:
        from odc_triton.jobs.data.encode import encode_records
        from odc_triton.jobs.data.tokenizer import TextEncoder, read_tokenizer

        if not encoders:
            encoders.append(TextEncoder.of(read_tokenizer(source)))
        (sample,) = encode_records([record], encoders[0], max_tokens=sys.maxsize)
        return len(sample.ids)

    return count


def take_turns(
    kinds: Sequence[type[Variant]], rounds: int, turn: Turns, ended: Callable[[list[Result], int], None]
) -> list[Result]:
    """Every variant's turn in every round, each round starting with another; one that fails gets no more turns.

    After each turn `ended` gets the results so far, and whose turn it was.
    """
    results = [
        Result(name=kind.name, is_baseline=kind in (*BASELINES, variants.Fsdp2SymmetricMemory)) for kind in kinds
    ]
    for round_ in range(rounds):
        for place in in_turn(range(len(kinds)), round_):
            if results[place].failure is not None:
                continue
            try:
                results[place].turns.append(turn(kinds[place], round_))
            except (RuntimeError, ValueError) as error:
                results[place].failure = str(error)
            ended(results, place)
    return results


def main(ranks: int, options: BenchOptions) -> int:
    """Runs it; returns 0, or 1 if no variant finished, one failed other than by memory, or losses differ."""
    if ranks < 1:
        raise ValueError(f"ranks is {ranks}; give at least 1")
    if options.quick:
        options = replace(options, rounds=1, minibatches=min(options.minibatches, 2))
    setting = setting_of(options, ranks, torch.cuda.device_count())
    kinds = chosen(options.variants, quick=options.quick)
    work, cut = work_of(options, ranks, setting)
    if setting.device == "cpu":
        single_thread_environment()
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    timed = [index for round_ in range(options.rounds) for index in work.indices(round_)[1:]]
    tokens, flops = [work.tokens(index) for index in timed], [work.flops(index) for index in timed]
    said = {"options": asdict(options), "ranks": ranks, **asdict(setting), "token_cap": work.token_cap, "cut": cut}
    said |= about()
    mean = sum(work.lengths) / len(work.lengths)
    heading = (
        f"{ranks} ranks on {setting.device}, {setting.dtype}; sequences of {min(work.lengths)} to {max(work.lengths)} "
        f"tokens, {mean:.0f} on average, {cut or 'none'} of them cut at {work.token_cap}, the most in a pack"
    )
    rounds = f"{options.rounds} round{'s' * (options.rounds > 1)} of {len(kinds)} variants"
    print(f"{heading}\n{rounds}, each of 1 minibatch to warm up and {options.minibatches} timed ones", flush=True)
    began_s = time.monotonic()

    def save(results: Sequence[Result]) -> str:
        turns = [turn for result in results for turn in result.turns]
        seen = {"gpu": turns[0].gpu, "parameters": turns[0].parameters} if turns else {}
        peak = peak_flops((seen.get("gpu") or {}).get("name"), setting.dtype)
        amounts = Amounts(tokens=tokens, flops=flops, ranks=ranks, peak=peak)
        text = f"{text_of(results, amounts)}\n\n{quiet_or_not(results)}"
        save_json(out / "lengths.json", as_data(results, amounts, said | seen))
        facts = asdict(options) | {key: value for key, value in (said | seen).items() if key != "options"}
        told = [f"- {key}: {_plain(value)}" for key, value in facts.items() if value is not None]
        lines = [heading, "", text, "", *told]
        write_file(out / "lengths.md", ("\n".join(lines) + "\n").encode())
        return text

    def ended(results: list[Result], place: int) -> None:
        result = results[place]
        save(results)
        took = result.remark or f"{sum(result.turns[-1].seconds) / len(result.turns[-1].seconds):.3f} s a minibatch"
        print(progress(results, options.rounds, f"{result.name}: {took}", time.monotonic() - began_s), flush=True)

    def turn(kind: type[Variant], round_: int) -> Turn:
        return launch(take_turn, kind, work, setting, round_, ranks=ranks)[0]

    results = take_turns(kinds, options.rounds, turn, ended)
    print(f"\n{save(results)}\n\nwritten to {out}: lengths.json, lengths.md")
    return verdict(results, setting.dtype)


def verdict(results: Sequence[Result], dtype: str) -> int:
    """Returns the exit status, and prints what is wrong to stderr."""
    spread = loss_spread(results)
    if spread > ALIKE[dtype]:
        print(f"first losses differ by {spread:.1e}: they did not train alike", file=sys.stderr)
        return 1
    broken = [result for result in results if result.failure is not None and not result.ran_out_of_memory]
    return 1 if broken or not any(result.turns for result in results) else 0


def _plain(value: object) -> object:
    return ", ".join(f"{name} {each}" for name, each in value.items()) if isinstance(value, dict) else value
