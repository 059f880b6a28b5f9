"""ODCGRPOTrainer where completions share prompts, beside its own dense packs: 2 ranks, update by update in turn.

    python -m bench.suites.prefixes_trainer [--updates 7] [--out bench/results/prefixes.json]

An update is a training step on completions that were sampled and scored before: they are assigned to the ranks, their
packs run forward and backward, metrics merge, the optimizer steps. Old log-probabilities are timed too. Dense packs
are of the trainer's default size, the longest completion with its prompt, and of a larger one; ratios are to the
faster.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

from odc_triton import fully_shard
from odc_triton.base.report import table
from odc_triton.comm.launch import launch
from odc_triton.hf import ODCGRPOTrainer, enable_packing
from tests.support import trl_case

from .. import quiet
from ..demo import RANKS
from ..harness import gather, in_turn, median_ratio, open_job, single_thread_environment
from ..provenance import about, options_of, save_parts
from ..reports.versus import LONG_CONFIG
from .prefixes import GROUP

CASES = ((1024, 256, 2), (1024, 256, 1), (64, 512, 1))  # prompt, completion, groups
ARMS: dict[str, dict[str, Any]] = {
    "shared": {},
    "dense": {"share_prefixes": "off"},
    "dense, 8,192 tokens": {"share_prefixes": "off", "token_cap": 8192},
}
_RATIOS = ("over_dense", "log_probs_over_dense")

Seconds = dict[str, list[float]]


class _Prepared(ODCGRPOTrainer):
    """Its batches are what TRL makes of completions."""

    current_gradient_accumulation_steps = 1  # Trainer's loop sets it

    def _prepare_inputs(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return inputs


def _batch(prompt: int, completion: int, groups: int, seed: int) -> dict[str, torch.Tensor]:
    """This rank's rows of a minibatch, as TRL has them."""
    rank, world = open_job()
    generator = torch.Generator().manual_seed(seed)
    rows = groups * GROUP
    prompts = torch.randint(3, LONG_CONFIG["vocab_size"], (groups, prompt), generator=generator)
    completions = torch.randint(3, LONG_CONFIG["vocab_size"], (rows, completion), generator=generator)
    own = slice(rank * rows // world, (rank + 1) * rows // world)
    batch = {
        "prompt_ids": prompts.repeat_interleave(GROUP, dim=0)[own],
        "completion_ids": completions[own],
        "advantages": torch.randn(rows, generator=generator)[own],
        "num_items_in_batch": torch.tensor(rows * completion),
    }
    masks = {f"{name}_mask": torch.ones_like(batch[f"{name}_ids"]) for name in ("prompt", "completion")}
    return batch | masks


def _timed(run: Callable[[], object]) -> tuple[float, bool]:
    """Seconds from all ranks' start to the last one's end, and whether others took the cores. Collective."""
    gather(None)  # a barrier
    start_s, waited_s = time.monotonic(), quiet.waited_s()
    run()
    spans = gather((start_s, time.monotonic(), quiet.waited_s() - waited_s))
    seconds = max(end_s for _, end_s, _ in spans) - min(start_s for start_s, _, _ in spans)
    return seconds, quiet.is_disturbed(seconds, [each for _, _, each in spans])


def _turn(trainer: ODCGRPOTrainer, optimizer: torch.optim.Optimizer, batch: dict) -> list[tuple[float, bool]]:
    """An update, and the log-probabilities after it. Collective."""
    ids, mask = (torch.cat([batch[f"prompt_{of}"], batch[f"completion_{of}"]], 1) for of in ("ids", "mask"))

    def update() -> None:
        trainer.training_step(trainer.model, batch)
        optimizer.step()
        optimizer.zero_grad()

    @torch.no_grad()
    def log_probs() -> None:
        trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, batch["completion_ids"].shape[1])

    return [_timed(run) for run in (update, log_probs)]


def measure(prompt: int, completion: int, groups: int, updates: int) -> tuple[Seconds, Seconds, int]:
    """By arm the seconds of updates and of old log-probabilities, and how many of all were disturbed. Collective."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    _, world = open_job()
    trl_case.environment()
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**LONG_CONFIG))
    enable_packing(model)
    model = fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    own = groups * GROUP // world
    how = {"num_generations": GROUP, "max_completion_length": completion, "gradient_checkpointing": False}
    update_s, log_probs_s, disturbed = {name: [] for name in ARMS}, {name: [] for name in ARMS}, 0
    with tempfile.TemporaryDirectory() as folder:
        trainers = {
            name: _Prepared(model, args=trl_case.arguments(folder, own, **how), **trl_case.given(), **changes)
            for name, changes in ARMS.items()
        }
        for number in range(1 + updates):
            batch = _batch(prompt, completion, groups, seed=number)
            for name in in_turn(list(ARMS), number):
                turns = _turn(trainers[name], optimizer, batch)
                if number:  # the first round warms up
                    for (seconds, was_disturbed), found in zip(turns, (update_s, log_probs_s), strict=True):
                        found[name].append(seconds)
                        disturbed += was_disturbed
    torch.distributed.destroy_process_group()
    return update_s, log_probs_s, disturbed


def _faster(seconds: Seconds) -> dict[str, float]:
    """The faster dense packs over shared ones."""
    best = min((each for name, each in seconds.items() if name != "shared"), key=statistics.median)
    return median_ratio(best, seconds["shared"])


def _spread(seconds: Seconds) -> dict[str, dict[str, float]]:
    return {
        name: {"median": statistics.median(each), "low": min(each), "high": max(each)} for name, each in seconds.items()
    }


def main() -> int:
    options = options_of(__doc__, updates=7)
    single_thread_environment()
    rows, start_s = [], time.monotonic()
    for prompt, completion, groups in CASES:
        update_s, log_probs_s, disturbed = launch(measure, prompt, completion, groups, options.updates, ranks=RANKS)[0]
        row = {"prompt": prompt, "completion": completion, "groups": groups}
        row |= {"over_dense": _faster(update_s), "update_s": _spread(update_s)}
        row |= {"log_probs_over_dense": _faster(log_probs_s), "log_probs_s": _spread(log_probs_s)}
        rows.append(
            row | {"updates": options.updates, "disturbed": disturbed, "timed": 2 * len(ARMS) * options.updates}
        )
    took_s = time.monotonic() - start_s
    if options.out is not None:
        command = f"python -m bench.suites.prefixes_trainer --updates {options.updates}"
        save_parts(options.out, trainer=rows, trainer_about={"command": command, "took_s": took_s, **about()})
    shown = []
    for row in rows:
        ratios = [f"{row[key]['ratio']:.2f} ({row[key]['low']:.2f} to {row[key]['high']:.2f})" for key in _RATIOS]
        medians = ", ".join(f"{name} {each['median']:.2f}" for name, each in row["update_s"].items())
        name = f"{row['groups']} x {GROUP} of {row['prompt']} + {row['completion']}"
        shown.append([name, *ratios, medians, f"{row['disturbed']} of {row['timed']}"])
    print(table(shown, ("", "update over dense", "log-probabilities", "median s of an update", "disturbed")))
    print(f"{took_s:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
