"""The demo: four ways to train one model on the same real text, side by side, with a table and an image.

One sample a rank, of very unequal lengths: no assignment balances them, so ranks wait, unless the longest is split.
Everything is fixed here before anything is measured: the text (the running Python's standard library), the lengths into
which it is cut (LongAlign-like, scaled to the model), the model, the samples of every minibatch. Nothing was tuned for
the ratio.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from odc_triton.jobs.data.dataset import DataOptions, TokenizedDataset, tokenize_source
from odc_triton.jobs.data.sources import RecordFiles
from odc_triton.jobs.data.tokenizer import TextEncoder
from odc_triton.jobs.launcher.launch import launch
from odc_triton.jobs.reports.report import (
    TITLE,
    Curves,
    curves_part,
    facts_part,
    save_html,
    save_timeline,
    table,
    table_part,
    text_part,
    timelines_part,
)
from odc_triton.jobs.reports.trace import excerpt, idle_fraction, save_trace, timeline_text
from odc_triton.packs.collate import count_target_tokens, pack_collate

from . import quiet
from .cut import cut, scaled_minibatches
from .harness import (
    Measured,
    Work,
    bootstrap_ratio,
    compare,
    disturbed,
    gather,
    in_turn,
    open_job,
    peak_memory,
    single_thread_environment,
)
from .provenance import about, save_json
from .stdlib_corpus import build_corpus, qwen2, write_text
from .variants import Fsdp2, Fsdp2NoReshard, Odc, OdcSplit, Unsharded, Variant

RANKS = 2
VARIANTS: tuple[type[Variant], ...] = (Fsdp2, Fsdp2NoReshard, Odc, OdcSplit)
TOKEN_CAP = 2048  # also the longest sample
CONFIG = qwen2(8192, 256, 704, 8, 4, 2, TOKEN_CAP, False)
LENGTHS = "longalign"  # scaled so that the longest has TOKEN_CAP tokens
SAMPLES_PER_RANK = 1
WARM_UP = 1
MINIBATCHES = 40
EQUAL_LENGTHS = [512] * 4  # of the pack that measures the overhead
OVERHEAD_REPEATS = 4
LOSS_TOLERANCE = 1e-3
SHOWN = range(WARM_UP, WARM_UP + 4)  # minibatches in the image


def text_of(folder: Path) -> np.ndarray:
    """Writes corpus and tokenizer into `folder`; returns the text, [tokens]."""
    folder.mkdir(parents=True, exist_ok=True)
    records, files = build_corpus()
    tokenizer = write_text(folder, records, CONFIG)
    prepared, options = folder / "text.npz", DataOptions(max_tokens=TOKEN_CAP)
    tokenize_source(RecordFiles([folder / "data.jsonl"]), TextEncoder.of(tokenizer), prepared, options)
    data = TokenizedDataset.load(prepared)
    print(f"text: {files} files of this Python's standard library, {len(data.tokens):,} tokens")
    return np.array(data.tokens)


def prepare(folder: Path) -> Work:
    """Writes corpus, tokenizer and samples into `folder`; returns what to train on."""
    text = text_of(folder)
    lengths, minibatches = scaled_minibatches(
        LENGTHS, longest=TOKEN_CAP, samples=RANKS * SAMPLES_PER_RANK, minibatches=WARM_UP + MINIBATCHES
    )
    cut(text, lengths).save(folder / "data.npz")
    print(
        f"samples: {SAMPLES_PER_RANK} per rank and minibatch, {min(lengths)} to {max(lengths)} tokens, "
        f"{statistics.mean(lengths):.0f} on average"
    )
    return Work(dataset=str(folder / "data.npz"), config=CONFIG, minibatches=minibatches, token_cap=TOKEN_CAP)


def balanced(kinds: Sequence[type[Variant]], work: Work, lengths: list[int], repeats: int) -> dict[str, list[float]]:
    """Seconds of a balanced minibatch of equal packs, without the optimizer step, by variant. Collective.

    `lengths`: tokens of each document in a pack; each rank has two packs. Each run takes as long as its slowest rank.
    Variants take turns, in a rotating order.
    """
    open_job()
    generator = torch.Generator().manual_seed(work.seed)
    documents = [torch.randint(4, work.config["vocab_size"], (length,), generator=generator) for length in lengths]
    packs = pack_collate([[{"input_ids": document} for document in documents]]) * 2
    total = count_target_tokens(packs) * dist.get_world_size()
    variants = [kind(work.build) for kind in kinds]
    seconds: dict[str, list[float]] = {variant.name: [] for variant in variants}
    for repeat in range(repeats + 1):
        for variant in in_turn(variants, repeat):
            dist.barrier()
            start_s = time.monotonic()
            variant.gradients(packs, total)
            took_s = max(gather(time.monotonic() - start_s))
            variant.optimizer.zero_grad()  # else plain torch's gradients get in malloc's way in ODC's turn
            if repeat:  # the first round warms up
                seconds[variant.name].append(took_s)
    dist.destroy_process_group()
    return seconds


def overhead(work: Work, lengths: list[int], repeats: int) -> dict[str, Any]:
    """ODC's time over plain torch's on a balanced minibatch, medians compared. Collective."""
    seconds = balanced((Odc, Unsharded), work, lengths, repeats)
    return {
        "fraction": statistics.median(seconds[Odc.name]) / statistics.median(seconds[Unsharded.name]) - 1,
        "unsharded_s": seconds[Unsharded.name],
        "odc_s": seconds[Odc.name],
    }


def make_report(results: list[Measured], memory: dict, slowdown: dict, work: Work, parameters: int) -> dict:
    """Everything that was measured, as plain data."""
    data = TokenizedDataset.load(work.dataset)
    timed = {result.name: result.seconds[WARM_UP:] for result in results}
    odc, split = timed[Odc.name], timed[OdcSplit.name]
    fastest, fastest_unsplit = (
        min((kind.name for kind in kinds), key=lambda name: sum(timed[name]))
        for kinds in ((Fsdp2, Fsdp2NoReshard), (Fsdp2, Fsdp2NoReshard, Odc))
    )
    in_window = range(WARM_UP, WARM_UP + MINIBATCHES)
    last = [result.losses[-1] for result in results]
    return {
        "speedup_vs_fsdp2": bootstrap_ratio(timed[Fsdp2.name], odc),
        "speedup_vs_fastest": {**bootstrap_ratio(timed[fastest], odc), "name": fastest},
        "speedup_split_vs_fsdp2": {**bootstrap_ratio(timed[fastest], split), "name": fastest},
        "speedup_split_vs_fastest": {**bootstrap_ratio(timed[fastest_unsplit], split), "name": fastest_unsplit},
        "disturbed": disturbed(results, WARM_UP),
        "overhead_vs_unsharded": slowdown["fraction"],
        "overhead_details": slowdown,
        "idle_fraction": {r.name: idle_fraction(excerpt({"": r.events}, minibatches=in_window)[""]) for r in results},
        "seconds": {result.name: result.seconds for result in results},
        "step_seconds": {result.name: result.step_seconds for result in results},
        "waited_s": {result.name: result.waited_s for result in results},
        "microbatches": {result.name: result.microbatches for result in results},
        "losses": {result.name: result.losses for result in results},
        "loss_first": {result.name: result.losses[0] for result in results},
        "loss_last": {result.name: result.losses[-1] for result in results},
        "peak_private_bytes": {name: peak["peak_private_bytes"] for name, peak in memory.items()},
        "memory": memory,
        "tokens": sum(int(data.lengths[i]) for samples in work.minibatches[WARM_UP:] for i in samples),
        "minibatches": MINIBATCHES,
        "warm_up_minibatches": WARM_UP,
        "params": parameters,
        "config": work.config,
        "token_cap": work.token_cap,
        "ranks": RANKS,
        **about(),
        "loss_spread": (max(last) - min(last)) / min(last),
    }


COLUMNS = (
    *("", "s per minibatch", "its time over ODC + split's", "95% interval", "idle", "waited for a core", "private MB"),
    "loss at the end",
)


def rows_of(report: dict) -> list[list[str]]:
    rows = []
    split = report["seconds"][OdcSplit.name][WARM_UP:]
    for name, seconds in report["seconds"].items():
        timed = seconds[WARM_UP:]
        ratio = bootstrap_ratio(timed, split)
        faster = (f"{ratio['ratio']:.2f}x", f"{ratio['low']:.2f} to {ratio['high']:.2f}")
        faster = ("", "") if name == OdcSplit.name else faster
        idle, private_mb = report["idle_fraction"][name], report["peak_private_bytes"][name] / 1e6
        waited = sum(map(max, report["waited_s"][name][WARM_UP:])) / sum(timed)  # the rank that waited most
        measured = (f"{idle:.1%}", f"{waited:.1%}", f"{private_mb:.0f}", f"{report['loss_last'][name]:.4f}")
        rows.append([name, f"{statistics.mean(timed):.2f}", *faster, *measured])
    return rows


def in_words(report: dict) -> str:
    """Which variant won, by how much, where memory differs, and whether to believe it."""

    def versus(key: str, name: str) -> str:
        value = report[key]
        sure = "" if value["low"] > 1 or value["high"] < 1 else ", which may be chance"
        low, high = value["low"], value["high"]
        if value["ratio"] < 1:
            return f"{1 / value['ratio']:.2f} times slower than {name} ({1 / high:.2f} to {1 / low:.2f}{sure})"
        return f"{value['ratio']:.2f} times faster than {name} ({low:.2f} to {high:.2f}{sure})"

    split_over, fastest = report["speedup_split_vs_fastest"]["name"], report["speedup_vs_fastest"]["name"]
    private, shared = report["peak_private_bytes"], report["memory"][OdcSplit.name]["shared_bytes"]
    return (
        f"ODC + split is {versus('speedup_split_vs_fastest', f'the fastest of the others, {split_over}')}. "
        f"Unsplit, ODC + LB-Mini is {versus('speedup_vs_fsdp2', Fsdp2.name)} and "
        f"{versus('speedup_vs_fastest', f'the faster FSDP2, {fastest}')}: with one sample a rank no assignment "
        f"balances lengths. Ranks are idle {report['idle_fraction'][OdcSplit.name]:.1%} of the time with split "
        f"sequences, {report['idle_fraction'][Odc.name]:.1%} without, FSDP2's "
        f"{report['idle_fraction'][Fsdp2.name]:.1%} (waiting and transfers).\n\n"
        f"{quiet.in_words(report['disturbed'], report['minibatches'])}\n\n"
        f"Peak private memory per rank is {private[OdcSplit.name] / 1e6:.0f} MB with split sequences, "
        f"{private[Odc.name] / 1e6:.0f} MB without, and {private[Fsdp2NoReshard.name] / 1e6:.0f} MB with FSDP2 without "
        f"resharding; parameters, gradients and what is read of split sequences are in {shared / 1e6:.0f} MB of shared "
        f"memory, once for the whole job. Against plain unsharded compute on a balanced minibatch ODC costs "
        f"{report['overhead_vs_unsharded']:+.1%}. All variants end with losses within "
        f"{report['loss_spread']:.1e} of each other."
    )


def heading(report: dict) -> str:
    """Of the timelines."""
    return TITLE + (" (the machine was not quiet)" if report["disturbed"]["left"] else "")


def main(out: Path) -> int:
    """Runs the demo; returns the exit status: 1 when the variants' losses differ."""
    start_s = time.monotonic()
    single_thread_environment()
    import matplotlib  # noqa: F401  missing: better said before the run than after it

    out.mkdir(parents=True, exist_ok=True)
    work = prepare(out / "data")
    parameters = sum(p.numel() for p in work.build().parameters())
    print(f"model: Qwen2, {parameters / 1e6:.1f} M parameters, random weights; {RANKS} ranks of one thread", flush=True)
    print(f"training {len(VARIANTS)} variants on the same {WARM_UP + MINIBATCHES} minibatches:", flush=True)
    results = launch(compare, VARIANTS, work, True, WARM_UP, ranks=RANKS)[0]
    print("overhead against unsharded compute, then each variant's memory alone:", flush=True)
    slowdown = launch(overhead, work, EQUAL_LENGTHS, OVERHEAD_REPEATS, ranks=RANKS)[0]
    lengths = work.data().lengths
    longest = max(work.minibatches, key=lambda samples: max(map(int, lengths[samples])))  # it reaches the peak
    few = replace(work, minibatches=[longest])
    memory = {kind.name: launch(peak_memory, kind, few, ranks=RANKS)[0] for kind in VARIANTS}
    report = make_report(results, memory, slowdown, work, parameters)
    write_outputs(out, report, results)
    print(f"\n{table(rows_of(report), COLUMNS)}\n\n{in_words(report)}\n")
    print(heading(report))
    print(timeline_text(excerpt({r.name: r.events for r in results}, minibatches=SHOWN)))
    print(
        f"\nwritten to {out}: report.html, timeline.png, trace.json, report.json ({time.monotonic() - start_s:.0f} s)"
    )
    if report["loss_spread"] > LOSS_TOLERANCE:
        print(f"the variants' losses differ by {report['loss_spread']:.1e}: they did not train alike", file=sys.stderr)
        return 1
    return 0


def write_outputs(out: Path, report: dict, results: Sequence[Measured]) -> None:
    tracks = excerpt({result.name: result.events for result in results}, minibatches=SHOWN)
    save_json(out / "report.json", report)
    save_trace(tracks, out / "trace.json")
    save_timeline(tracks, out / "timeline.png", title=heading(report))
    facts = {**report["versions"], "hardware": report["hardware"], "commit": report["commit"]}
    facts |= {
        "model": f"Qwen2, {report['params']:,} parameters, random weights",
        "work": f"{report['minibatches']} minibatches after {report['warm_up_minibatches']} to warm up, "
        f"{report['tokens']:,} tokens, {SAMPLES_PER_RANK} sample per rank of at most {report['token_cap']} tokens, "
        f"{report['ranks']} ranks of 1 thread",
        "idle": "time in no busy span or blocked in a barrier or collective, or for a segment, transfers included",
        "waited for a core": "time in which a rank's computing thread could run and other threads had the cores; a "
        f"minibatch that waited for over {quiet.MOST_WAITING:.0%} of its time is measured again",
    }
    save_html(
        out / "report.html",
        title="On-demand communication and split sequences against FSDP2, on the CPU backend",
        parts=[
            text_part(in_words(report)),
            table_part(rows_of(report), COLUMNS),
            timelines_part(tracks),
            curves_part(
                Curves(title="Equal curves mean equal updates", label="loss per token", values=report["losses"])
            ),
            facts_part("How it was measured", facts),
        ],
    )


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "out/demo")))
