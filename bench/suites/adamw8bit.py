"""`train sft` with 8-bit AdamW and with fp32 states: python -m bench.suites.adamw8bit [--steps 300] [--out FILE]

The same run on two ranks by both, on the standard library's functions, with some of them held out. Losses, and bytes of
the optimizer's states, as their last checkpoint lists them. Exits with status 1 if losses differ by 1% or more, or less
than 95% of the states' bytes are 8-bit.
"""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from odc_triton.checkpoint.dcp import read_metadata, tensors_of
from odc_triton.jobs.checkpoints.steps import newest_in
from odc_triton.jobs.options.config_file import write_config
from odc_triton.jobs.reports.report import table
from odc_triton.jobs.train.metrics import read_metrics
from odc_triton.jobs.train.sft_options import SftOptions

from ..provenance import about, options_of, save_parts
from ..stdlib_corpus import build_corpus, qwen2, write_text

RANKS, LAST, MOST, LEAST = 2, 20, 0.01, 0.95  # of the loss; of the bytes
CONFIG = qwen2(2048, 128, 384, 2, 4, 2, 512, False)


def state_bytes(checkpoint: Path) -> dict[str, int]:
    """Of all ranks: of parameters with codes, these and their blocks' absmax; of the others; of counts of steps."""
    tensors, found = tensors_of(read_metadata(checkpoint)), {"8-bit": 0, "fp32": 0, "steps": 0}
    states = {name: each for name, each in tensors.items() if name.startswith("optimizer.state.")}
    for name, each in states.items():
        parameter, _, kind = name.rpartition(".")
        dtype = "8-bit" if f"{parameter}.absmax1" in states else "fp32"
        found["steps" if kind == "step" else dtype] += math.prod(each.size) * each.properties.dtype.itemsize
    return found


def trained(optimizer: str, folder: Path, steps: int) -> dict[str, Any]:
    how = {"data": folder / "data.jsonl", "init": folder / "config.json", "tokenizer": folder / "tokenizer.json"}
    how |= {"steps": steps, "samples_per_rank": 4, "truncate": True, "token_cap": 256, "lr": 1e-3, "weight_decay": 0.01}
    options = SftOptions(out=folder / optimizer, optimizer=optimizer, eval_fraction=0.03, **how)
    write_config(config := f"{options.out}.yaml", options, comment="the run", ranks=RANKS)
    subprocess.run([sys.executable, "-m", "odc_triton.tools.cli", "train", "sft", "--config", config], check=True)
    lines = read_metrics(Path(options.out, "metrics.jsonl"))
    losses = [line["loss"] for line in lines if "loss" in line]
    evaluated = next(line["eval_loss"] for line in reversed(lines) if "eval_loss" in line)
    found = {"loss": statistics.mean(losses[-LAST:]), "eval_loss": evaluated, "first_loss": losses[0]}
    return found | {"losses": losses, "state_bytes": state_bytes(newest_in(Path(options.out, "checkpoints")))}


def main() -> int:
    given = options_of(__doc__, steps=300)
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as scratch:
        records, _ = build_corpus()
        write_text(Path(scratch), records, CONFIG)
        runs = {name: trained(name, Path(scratch), given.steps) for name in ("adamw", "adamw-8bit")}
    plain, ours = runs.values()
    ratios = {key: ours[key] / plain[key] for key in ("loss", "eval_loss")}
    share = ours["state_bytes"]["8-bit"] / sum(ours["state_bytes"].values())
    rows = [
        [name, *(f"{run[key]:.4f}" for key in ("first_loss", "loss", "eval_loss")), sum(run["state_bytes"].values())]
        for name, run in runs.items()
    ]
    print(table(rows, ("optimizer", "first loss", f"mean of the last {LAST}", "held out", "bytes of states")))
    print(f"{share:.1%} of the 8-bit run's states are 8-bit; losses, to fp32 states': {ratios}")
    if given.out is not None:
        how = {"ranks": RANKS, "steps": given.steps, "config": CONFIG, "eight_bit_share": share, "ratios": ratios}
        save_parts(given.out, about=about(), **how, runs=runs)
    return int(any(abs(each - 1) >= MOST for each in ratios.values()) or share < LEAST)


if __name__ == "__main__":
    sys.exit(main())
