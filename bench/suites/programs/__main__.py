"""Trainer under FSDP2, and the same program by `odc_triton.run`, in turns.

    python -m bench.suites.programs [--rounds 5] [--steps 8] [--out OUT.json]

Each round runs both as processes of their own, in alternating order, through all cells: layers that sleep in turns on
the ranks, equal lengths, LongAlign-like lengths with one and four microbatches; and, once, SGD and AdamW to compare
weights. A cell's ratio is the median over rounds of the medians over steps, without the first two.
"""

from __future__ import annotations

import json
import os
import random
import re
import statistics
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import Qwen2Config, Qwen2ForCausalLM

from ...demo import CONFIG, RANKS, TOKEN_CAP
from ...harness import in_turn, median_ratio
from ...provenance import RESULTS, about, options_of, save_json

_WARM_UP = 2
_TRAINER = Path(__file__).with_name("trainer.py")
_ARMS = {"FSDP2": (), "odc_triton.run": ("-m", "odc_triton.run", "--strict")}


def _longalign_like(count: int, seed: int) -> list[int]:
    """LongAlign's mean 16.5 K and maximum 64 K tokens, divided by 32."""
    numbers = random.Random(seed)
    return [min(max(int(numbers.lognormvariate(5.8, 1.0)), 16), TOKEN_CAP) for _ in range(count)]


def _cells(steps: int, seed: int, model: str) -> dict[str, dict[str, Any]]:
    common = {"steps": steps, "optim": "adamw_torch", "sleeps": False, "saves": False, "model": model}
    return {
        "slow in turns": {**common, "microbatches": 4, "sleeps": True, "lengths": [64] * (4 * RANKS * steps)},
        "equal lengths": {**common, "microbatches": 1, "lengths": [512] * (RANKS * steps)},
        "LongAlign-like, 1 microbatch": {
            **common,
            "microbatches": 1,
            "lengths": _longalign_like(RANKS * steps, seed),
        },
        "LongAlign-like, 4 microbatches": {
            **common,
            "microbatches": 4,
            "lengths": _longalign_like(4 * RANKS * steps, seed),
        },
    }


def _weighed(model: str) -> dict[str, dict[str, Any]]:
    """Six steps of each optimizer, whose weights are compared."""
    lengths = _longalign_like(4 * RANKS * 6, 0)
    cell = {"steps": 6, "sleeps": False, "saves": True, "model": model, "microbatches": 4, "lengths": lengths}
    return {"SGD": {**cell, "optim": "sgd"}, "AdamW": {**cell, "optim": "adamw_torch"}}


def _run(arm: str, cells: dict[str, dict[str, Any]], out: Path) -> tuple[dict[str, list[float]], str]:
    """Seconds by cell and step, and the last line on stderr."""
    out.mkdir(parents=True)
    (out / "cells.json").write_text(json.dumps(cells))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [*torchrun, *_ARMS[arm], str(_TRAINER), str(out), str(out / "cells.json")]
    done = subprocess.run(command, env=environment, check=True, stderr=subprocess.PIPE, text=True)
    said = re.findall(r"^odc-triton: .*by on-demand.*", done.stderr, re.MULTILINE)
    return json.loads((out / "seconds.json").read_text()), said[-1] if said else ""


def _largest_difference(one: Path, other: Path) -> float:
    from safetensors.torch import load_file

    weights = [load_file(folder / "model.safetensors") for folder in (one, other)]
    return max((weights[0][name].double() - weights[1][name].double()).abs().max().item() for name in weights[0])


def measure(rounds: int, steps: int, folder: Path) -> dict[str, Any]:
    model = str(folder / "model")
    Qwen2ForCausalLM(Qwen2Config(**CONFIG)).save_pretrained(model)
    taken: dict[str, dict[str, list[float]]] = {}
    last = ""
    for number in range(rounds):
        for arm in in_turn(list(_ARMS), number):
            seconds, said = _run(arm, _cells(steps, number, model), folder / f"{number}" / arm)
            last = said or last
            for cell, each in seconds.items():
                taken.setdefault(cell, {}).setdefault(arm, []).append(statistics.median(each[_WARM_UP:]))
            print(f"round {number}, {arm}: {said}", flush=True)
    for arm in _ARMS:
        _run(arm, _weighed(model), folder / "weights" / arm)
    compared = {
        name: _largest_difference(*(folder / "weights" / arm / name for arm in _ARMS)) for name in _weighed(model)
    }
    ratios = {cell: median_ratio(by_arm["odc_triton.run"], by_arm["FSDP2"]) for cell, by_arm in taken.items()}
    numbers = [int(each) for each in re.findall(r"(\d+) (?:minibatch|wait)", last)]
    waits = sum(numbers[1::2]) / sum(numbers[::2])
    return {"seconds": taken, "of_fsdp2": ratios, "waits_per_step": waits, "differences": compared, "last_line": last}


def main() -> None:
    options = options_of(__doc__ or "", rounds=5, steps=8)
    with TemporaryDirectory() as folder:
        result = measure(options.rounds, options.steps, Path(folder))
    for cell, ratio in result["of_fsdp2"].items():
        print(f"{cell}: {ratio['ratio']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f}) of FSDP2's time")
    print(f"waits per step {result['waits_per_step']:.2f}; weights differ by {result['differences']}")
    save_json(options.out or RESULTS / "programs.json", about() | result | {"rounds": options.rounds})


if __name__ == "__main__":
    main()
