"""GRPO with long prompts, with and without shared prefixes: counting on from a number, after solved examples.

    python -m bench.grpo_prefixes [FOLDER] [--seeds 0 1 2] [--out bench/results/prefixes.json]
    python -m bench.grpo_prefixes [FOLDER] --demo      one seed, with shared prefixes

As in bench.grpo, what is taught is a mixture, to count up or down from the number's digit, anew at each step, and what
is rewarded is a choice: up. Two runs of 5 steps learn from the same recorded completions. Then, of each seed, two runs
sample for themselves. All start from one model that `train sft` has taught. FOLDER must not exist.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from odc_triton.data.tokenizer import COMPLETION, END, PROMPT
from odc_triton.rl.generation import Request, Sampled, SamplingOptions
from odc_triton.rl.transformers_engine import TransformersEngine
from odc_triton.train import grpo
from odc_triton.train.grpo_options import GrpoOptions
from odc_triton.train.sft import run_sft

from .grpo import job, phases, rewarded, taught
from .provenance import about, save_parts
from .sorting import CONFIG, UP, write_tokenizer

SHOTS, DIGITS = 16, 6  # examples of a prompt, and digits of a number and of its answer
SFT_STEPS = 80
OPTIONS = {"steps": 30, "prompts_per_rank": 4, "max_new_tokens": 10, "lr": 2e-4}
RECORDED_STEPS = 5
SHARES = ("off", "auto")


def counted(number: str, steps: Iterable[int]) -> str:
    return "".join(str(each % 10) for each in list(accumulate(steps, initial=int(number[-1])))[1:])


def write_task(folder: Path) -> None:
    """Writes sft.jsonl, prompts.jsonl, held_out.jsonl, config.json and tokenizer.json.

    A prompt is one digit over and over, with answers between: a small model learns soon to count from it. Of the texts
    in sft.jsonl every token is learned; most are short.
    """
    numbers = random.Random(0)

    def answered(number: str) -> str:
        return f"{number}{COMPLETION}{counted(number, [1 if numbers.random() < UP else -1 for _ in number])}"

    folder.mkdir(parents=True)  # runs would resume those of an older folder
    for name, count in (("sft", 8_000), ("prompts", 1_000), ("held_out", 200)):
        records = []
        for _ in range(count):
            shots = numbers.choice((0, 0, 0, 1, 2, SHOTS)) if name == "sft" else SHOTS
            number = DIGITS * str(numbers.randrange(10))
            examples = "".join(f"{answered(number)}{END}{PROMPT}" for _ in range(shots))
            asked = {"prompt": examples + number, "answer": counted(number, [1] * DIGITS)}
            records.append({"text": PROMPT + examples + answered(number)} if name == "sft" else asked)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    (folder / "config.json").write_text(json.dumps(CONFIG | {"max_position_embeddings": 1024}))
    write_tokenizer(folder)


class Recorded(TransformersEngine):
    """Samples what no run has sampled before, into files beside the runs' folders, which later runs read."""

    folder: Path

    def generate(self, requests: Sequence[Request], options: SamplingOptions) -> list[list[Sampled]]:
        paths = [self.folder / f"{request.seeds[0]}.json" for request in requests]
        if not all(path.exists() for path in paths):
            for path, made in zip(paths, super().generate(requests, options), strict=True):
                path.write_text(json.dumps([asdict(one) for one in made]))
        return [[Sampled(**one) for one in json.loads(path.read_bytes())] for path in paths]


def run_recorded(options: GrpoOptions) -> Any:
    """A rank of `train grpo` on recorded completions."""
    Recorded.folder = Path(options.out).parent / "recorded"
    Recorded.folder.mkdir(exist_ok=True)
    grpo.TransformersEngine = Recorded
    return grpo.run_grpo(options)


def warm_up(folder: Path) -> dict[str, float]:
    write_task(folder)
    return job(run_sft, replace(taught(folder, 0), steps=SFT_STEPS))


def learn(folder: Path, seed: int, out: str, run: Any = grpo.run_grpo, **changes: Any) -> dict[str, Any]:
    """A run of GRPO: what its model then does, and its median seconds."""
    found = job(run, rewarded(folder, seed, out, **OPTIONS | changes))
    print(f"seed {seed}, {out}: {found['exact_match']:.1%} exact in {found['wall_s']:.0f} s", flush=True)
    return found | {"median_s": phases(folder / out)}


def recorded_apart(folder: Path) -> float:
    """The largest difference of weights after steps on the same completions."""
    for share in SHARES:
        learn(folder, 0, f"recorded-{share}", run_recorded, steps=RECORDED_STEPS, share_prefixes=share)
    ends = [load_file(folder / f"recorded-{share}" / "model" / "model.safetensors") for share in SHARES]
    return max(float((ends[0][name] - value).abs().max()) for name, value in ends[1].items())


def study(folder: Path, seeds: Sequence[int]) -> dict[str, Any]:
    before, rows = warm_up(folder), []
    print(f"taught for {before['wall_s']:.0f} s, {before['exact_match']:.1%} exact", flush=True)
    apart = recorded_apart(folder)
    print(f"weights {apart:.1e} apart", flush=True)
    for seed in seeds:
        rows.append({share: learn(folder, seed, f"{share}-{seed}", share_prefixes=share) for share in SHARES})
    gains = {
        name: statistics.median(row["off"]["median_s"][of] / row["auto"]["median_s"][of] for row in rows)
        for name, of in (("update", "update_s"), ("step", "seconds"))
    }
    return {
        "weights_apart": apart,
        "recorded_steps": RECORDED_STEPS,
        "exact_match_before": before["exact_match"],
        "gain": gains,
        "seeds": [{"seed": seed, **row} for seed, row in zip(seeds, rows, strict=True)],
        **about(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("out/grpo-prefixes"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("bench/results/prefixes.json"), help="whose other keys stay")
    parser.add_argument("--demo", action="store_true")
    options = parser.parse_args()
    if options.demo:
        warm_up(options.folder)
        learn(options.folder, 0, "grpo")
    else:
        save_parts(options.out, grpo=study(options.folder, options.seeds))


if __name__ == "__main__":
    main()
