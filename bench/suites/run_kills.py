"""`train sft` while it is killed: python -m bench.suites.run_kills [--kills 40] [--seed 0] [--out FILE]

Two ranks save by the clock. After a random time a rank, or the launcher, is killed; then the same command starts again.
Each survivor must name the dead rank; no kill may lose more training than the interval; at the end losses must be those
of a run that nothing disturbed. Else it exits with status 1.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from odc_triton.jobs.checkpoints.steps import newest_in
from odc_triton.jobs.options.config_file import write_config
from odc_triton.jobs.reports.report import table
from odc_triton.jobs.train.metrics import read_metrics
from odc_triton.jobs.train.sft_options import SftOptions

from ..provenance import about, options_of, save_parts
from ..stdlib_corpus import build_corpus, write_text

RANKS, INTERVAL_S, TOLERANCE = 2, 3.0, 1e-5  # gradients are added in the order of their arrival
LONG_S = 600.0
CONFIG = {
    "model_type": "qwen2",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
COLUMNS = ("killed", "times", "named", "s to the end, median", "largest", "s of training lost, largest")


def start(options: SftOptions) -> subprocess.Popen:
    write_config(config := f"{options.out}.yaml", options, comment="the run", ranks=RANKS)
    command = [sys.executable, "-m", "odc_triton.tools.cli", "train", "sft", "--config", config]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def ranks_of(launcher: subprocess.Popen) -> list[psutil.Process]:
    """By their numbers; none while they start."""
    found = sorted(psutil.Process(launcher.pid).children(), key=lambda each: (each.create_time(), each.pid))
    return found if len(found) == RANKS else []


def lost_s(out: Path) -> float:
    """Seconds of training since the newest checkpoint."""
    newest = newest_in(out / "checkpoints")
    saved = 0 if newest is None else int(newest.name.removeprefix("step-"))
    return sum(line["seconds"] for line in read_metrics(out / "metrics.jsonl") if line["step"] > saved)


def strike(options: SftOptions, numbers: random.Random) -> dict[str, Any] | None:
    """Starts the run and kills one of its processes; None if it ended before that."""
    launcher, wait_s = start(options), numbers.uniform(0.0, 3 * INTERVAL_S)
    who = numbers.choice(["a rank", "a rank", "the launcher"])
    begun = Path(options.out, "metrics.jsonl")
    before = begun.stat().st_mtime_ns if begun.exists() else 0
    while launcher.poll() is None and not (begun.exists() and begun.stat().st_mtime_ns > before):
        if numbers.random() < 0.002:  # now and then while it starts
            break
        time.sleep(0.05)
    time.sleep(wait_s)
    try:
        victim, ranks = psutil.Process(launcher.pid), ranks_of(launcher)
    except psutil.NoSuchProcess:
        return None
    if launcher.poll() is not None:
        return None
    rank = numbers.randrange(RANKS) if ranks and who == "a rank" else None
    victim = victim if rank is None else ranks[rank]
    killed_s = time.monotonic()
    victim.send_signal(signal.SIGKILL)
    text = launcher.communicate(timeout=LONG_S)[1]
    _, alive = psutil.wait_procs(ranks, timeout=60.0)
    named = not alive if rank is None else f"rank {rank} failed first: its process was killed by SIGKILL" in text
    of_kill = {"named": named, "ended_s": time.monotonic() - killed_s, "lost_s": lost_s(Path(options.out))}
    return {"who": "the launcher" if rank is None else "a rank"} | of_kill


def main() -> int:
    given = options_of(__doc__, kills=40, seed=0)
    os.environ["OMP_NUM_THREADS"] = "1"
    numbers, kills, runs, wrong = random.Random(given.seed), [], 0, []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        records, _ = build_corpus()
        write_text(folder, records, CONFIG, count=400)
        how = {"data": folder / "data.jsonl", "init": folder / "config.json", "tokenizer": folder / "tokenizer.json"}
        how |= {"steps": 300, "samples_per_rank": 4, "truncate": True, "token_cap": 512, "resume": "auto"}
        how |= {"checkpoint_minutes": INTERVAL_S / 60}
        start(SftOptions(out=folder / "whole", **how)).communicate(timeout=LONG_S)
        want = [line["loss"] for line in read_metrics(folder / "whole" / "metrics.jsonl")]
        while len(kills) < given.kills:
            options, runs = SftOptions(out=folder / f"run-{runs}", **how), runs + 1
            while len(kills) < given.kills and (kill := strike(options, numbers)) is not None:
                kills.append(kill)
                print(kill, flush=True)
            start(options).communicate(timeout=LONG_S)
            got = [line["loss"] for line in read_metrics(Path(options.out) / "metrics.jsonl")]
            wrong += [options.out] * (
                len(got) != len(want) or any(abs(a - b) > TOLERANCE * abs(b) for a, b in zip(got, want, strict=True))
            )
    rows = []
    for who in ("a rank", "the launcher"):
        some = [each for each in kills if each["who"] == who]
        ended = [each["ended_s"] for each in some] or [0.0]
        lost = max((each["lost_s"] for each in some), default=0.0)
        named = sum(each["named"] for each in some)
        rows.append([who, len(some), named, f"{statistics.median(ended):.2f}", f"{max(ended):.2f}", f"{lost:.2f}"])
    print(table(rows, COLUMNS))
    print(
        f"{runs} runs, saved every {INTERVAL_S:g} s at least; {len(wrong)} with other losses than the undisturbed one"
    )
    if given.out is not None:
        save_parts(given.out, about=about(), interval_s=INTERVAL_S, runs=runs, other_losses=len(wrong), kills=kills)

    return int(bool(wrong) or any(not each["named"] or each["lost_s"] > INTERVAL_S for each in kills))


if __name__ == "__main__":
    sys.exit(main())
