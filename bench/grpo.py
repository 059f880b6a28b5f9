"""GRPO on a task that a CPU can learn: sorting digits. Held-out exact match before and after, and of controls.

    python -m bench.grpo [FOLDER] [--seeds 0 1 2] [--out bench/results/grpo.json]
    python -m bench.grpo [FOLDER] --demo      one seed, without controls (make demo-rl)

Each seed: a model of 1.2 million parameters is taught by `train sft` for about a minute; then `train grpo` goes on with
other numbers. It is taught to sort both up and down, and rewarded for up only (see sorting.py). Exact match is measured
on held-out numbers by plain transformers, greedily, from the folders that both jobs write.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from odc_triton.jobs.launcher.launch import launch
from odc_triton.jobs.train.grpo import run_grpo
from odc_triton.jobs.train.grpo_options import GrpoOptions
from odc_triton.jobs.train.metrics import read_metrics
from odc_triton.jobs.train.sft import run_sft
from odc_triton.jobs.train.sft_options import SftOptions

from .harness import single_thread_environment
from .provenance import about, save_json
from .sorting import credit, write_task

RANKS = 2
TAUGHT, PROMPTS, HELD_OUT = 20_000, 4_000, 400
SFT_STEPS, GRPO_STEPS = 150, 30
REWARD, RANDOM = "bench.sorting:sorted_reward", "bench.sorting:random_reward"


def taught(folder: Path, seed: int) -> SftOptions:
    """The options of the warm-up."""
    return SftOptions(
        data=str(folder / "sft.jsonl"),
        init=str(folder / "config.json"),
        tokenizer=str(folder / "tokenizer.json"),
        out=str(folder / "sft"),
        steps=SFT_STEPS,
        samples_per_rank=32,
        token_cap=2048,
        lr=1e-3,
        warmup_steps=20,
        seed=seed,
    )


def rewarded(folder: Path, seed: int, out: str, **changes: Any) -> GrpoOptions:
    wanted = {
        "data": str(folder / "prompts.jsonl"),
        "model": str(folder / "sft" / "model"),
        "out": str(folder / out),
        "reward": (REWARD,),
        "steps": GRPO_STEPS,
        "prompts_per_rank": 16,
        "token_cap": 2048,
        "max_new_tokens": 48,
        "decode_at_once": 32,
        "lr": 3e-5,
        "loss": "dr_grpo",
        "scale_rewards": "none",  # where all of a group fail, their small differences are noise
        "schedule": "constant",
        "warmup_steps": 5,
        "seed": seed,
    }
    return GrpoOptions(**wanted | changes)


def examine(model: Path, held_out: Path) -> dict[str, float]:
    """Exact match and mean reward of greedy completions, by plain transformers in this process."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    records = [json.loads(line) for line in held_out.read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(model).eval()
    made = []
    for start in range(0, len(records), 100):
        texts = [f"<|prompt|>{each['prompt']}<|completion|>" for each in records[start : start + 100]]
        inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
        with torch.no_grad():
            ids = network.generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                max_new_tokens=48,
                do_sample=False,
            )
        made += tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    rewards = [credit(text.replace(" ", ""), each["answer"]) for text, each in zip(made, records, strict=True)]
    return {"exact_match": statistics.mean(reward == 1.0 for reward in rewards), "reward": statistics.mean(rewards)}


def job(run: Any, options: Any) -> dict[str, float]:
    """Runs a job to its end; what its model then does, and the job's wall time."""
    start_s = time.monotonic()
    single_thread_environment()
    launch(run, options, ranks=RANKS)
    took_s = time.monotonic() - start_s
    return examine(Path(options.out) / "model", Path(options.out).parent / "held_out.jsonl") | {"wall_s": took_s}


def warm_up(folder: Path, seed: int) -> dict[str, float]:
    write_task(folder, seed=seed, taught=TAUGHT, prompts=PROMPTS, held_out=HELD_OUT)
    return job(run_sft, taught(folder, seed))


def phases(out: Path) -> dict[str, float]:
    """Median seconds of a run's steps and of their phases."""
    lines, names = read_metrics(out / "metrics.jsonl"), ("rollout_s", "scoring_s", "update_s", "seconds")
    return {name: statistics.median(line[name] for line in lines) for name in names}


def one_seed(folder: Path, seed: int) -> dict[str, Any]:
    """The warm-up and GRPO of one seed."""
    before = warm_up(folder, seed)
    print(f"seed {seed}: taught for {before['wall_s']:.0f} s, {before['exact_match']:.1%} exact", flush=True)
    after = job(run_grpo, rewarded(folder, seed, "grpo"))
    print(f"seed {seed}: GRPO for {after['wall_s']:.0f} s, {after['exact_match']:.1%} exact", flush=True)
    return {
        "seed": seed,
        "exact_match_before": before["exact_match"],
        "exact_match_after": after["exact_match"],
        "reward_before": before["reward"],
        "reward_after": after["reward"],
        "sft_wall_s": before["wall_s"],
        "grpo_wall_s": after["wall_s"],
        "median_s": phases(folder / "grpo"),
    }


def controls(folder: Path, found: dict[str, Any]) -> dict[str, float]:
    """From the same warm-up: SFT for as long as GRPO took; GRPO with random rewards."""
    seed = found["seed"]
    per_step_s = statistics.median(line["seconds"] for line in read_metrics(folder / "sft" / "metrics.jsonl"))
    steps = max(1, round(found["grpo_wall_s"] / per_step_s))
    more = {"init": None, "tokenizer": None, "model": str(folder / "sft" / "model"), "out": str(folder / "sft-more")}
    more = job(run_sft, replace(taught(folder, seed), **more, steps=steps, seed=seed + 1000))
    chance = job(run_grpo, rewarded(folder, seed, "random", reward=(RANDOM,)))
    print(f"seed {seed}: SFT instead {more['exact_match']:.1%}, random rewards {chance['exact_match']:.1%}", flush=True)
    return {
        "sft_same_time": more["exact_match"],
        "sft_same_time_wall_s": more["wall_s"],
        "random_reward": chance["exact_match"],
    }


def study(folder: Path, seeds: list[int]) -> dict[str, Any]:
    found = [one_seed(folder / f"seed-{seed}", seed) for seed in seeds]
    of_controls = controls(folder / f"seed-{seeds[0]}", found[0])
    return {"seeds": found, "controls": {"seed": seeds[0], **of_controls}, "ranks": RANKS, **about()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("out/grpo"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("bench/results/grpo.json"))
    parser.add_argument("--demo", action="store_true")
    options = parser.parse_args()
    if options.demo:
        one_seed(options.folder, options.seeds[0])
        print(f"the report is {options.folder / 'grpo' / 'report.html'}")
    else:
        save_json(options.out, study(options.folder, options.seeds))


if __name__ == "__main__":
    main()
