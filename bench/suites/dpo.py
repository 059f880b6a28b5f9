"""DPO's update by ODCDPOTrainer, beside TRL's DPOTrainer on a model of torch's FSDP2: 2 ranks, step by step in turn.

    python -m bench.suites.dpo [--steps 3] [--out bench/results/dpo.json]

Prompts and completions have random words, and lengths that were drawn before anything was measured, with heavy tails.
A step takes the same pairs in both. TRL's pads them in batches, in several settings; ratios are to the fastest. The
bound is counted from lengths alone: what FSDP2's slowest rank computes in each batch, with its padding, over an equal
part of what the pairs' documents cost, with each prompt computed once.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM
from trl import DPOConfig, DPOTrainer

from odc_triton import fully_shard
from odc_triton.balance import CostModel
from odc_triton.base.report import table
from odc_triton.comm.launch import launch
from odc_triton.hf import ODCDPOTrainer, enable_packing
from tests.support import trl_case

from ..demo import RANKS
from ..harness import in_turn, median_ratio, open_job, single_thread_environment, timed_together
from ..provenance import about, options_of, save_parts
from ..reports.versus import LONG_CONFIG

PAIRS = 8  # of a rank and step
# TRL's trainer: pairs that it computes at once, and FSDP2's reshard_after_forward. Larger batches are slower.
ARMS = {"FSDP2, 1 pair": (1, None), "FSDP2, 1 pair, without resharding": (1, False), "FSDP2, 2 pairs": (2, None)}
# Median and largest tokens of prompts and completions: of chats, and of long prompts.
CASES = {"chats": ((160, 768), (120, 512)), "long prompts": ((512, 1536), (96, 256))}
_SIGMA = 0.9

Lengths = list[tuple[int, int, int]]  # of each pair: prompt, chosen, rejected


def drawn(case: str, steps: int) -> Lengths:
    numbers, (prompts, completions) = random.Random(0), CASES[case]

    def length(median: int, most: int) -> int:
        return min(max(round(median * numbers.lognormvariate(0.0, _SIGMA)), 4), most)

    return [(length(*prompts), length(*completions), length(*completions)) for _ in range(RANKS * PAIRS * steps)]


def bound(lengths: Lengths, batch: int, cost: CostModel) -> float:
    """Of one step's pairs, in their order."""
    slowest = 0.0
    for first in range(0, PAIRS, batch):
        of_ranks = []
        for rank in range(RANKS):
            some = lengths[rank * PAIRS + first :][:batch]
            longest = max(prompt + max(answers) for prompt, *answers in some)
            of_ranks.append(2 * len(some) * cost.sequence(longest))
        slowest += max(of_ranks)
    once = sum(
        cost.sequence(prompt + chosen) + cost.sequence(prompt + rejected) - cost.sequence(prompt)
        for prompt, chosen, rejected in lengths
    )
    return slowest / (once / RANKS)


class _Fsdp2DpoTrainer(DPOTrainer):
    """On a model that FSDP2 has sharded already."""

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        return self.accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)

    def update(self, pairs: Sequence[dict[str, Any]], batch: int) -> None:
        self.model.train()
        for first in range(0, len(pairs), batch):
            loss = self.compute_loss(self.model, self.data_collator(pairs[first : first + batch]))
            (loss * batch / len(pairs)).backward()


def _model(seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(Qwen2Config(**LONG_CONFIG))


def _by_fsdp2(model: PreTrainedModel, reshard: bool | None) -> PreTrainedModel:
    for part in (*model.model.layers, model):
        fsdp2_fully_shard(part, reshard_after_forward=reshard)
    return model


def measure(case: str, steps: int) -> tuple[dict[str, list[float]], list[Lengths], int]:
    """By arm the seconds of each step; the pairs' lengths by step; how many turns were disturbed. Collective."""
    rank, _ = open_job()
    trl_case.environment()
    words = random.Random(1)

    def text(tokens: int) -> str:
        return " ".join(f"w{words.randrange(3, 97)}" for _ in range(tokens))

    lengths = drawn(case, 1 + steps)
    texts = [[text(prompt) + " ", *(text(each - 1) for each in more)] for prompt, *more in lengths]  # and an end
    data = Dataset.from_list([dict(zip(("prompt", "chosen", "rejected"), each, strict=True)) for each in texts])
    with tempfile.TemporaryDirectory() as folder:
        args = {"output_dir": folder, "per_device_train_batch_size": PAIRS, "max_length": None, "report_to": "none"}
        args |= {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "disable_tqdm": True}
        given = {"train_dataset": data, "processing_class": trl_case.tokenizer()}
        models = [_model(seed) for seed in (0, 1)]
        for each in models:
            enable_packing(each)
        ours = ODCDPOTrainer(*(fully_shard(each) for each in models), DPOConfig(**args), **given)
        theirs = {
            reshard: _Fsdp2DpoTrainer(
                *(_by_fsdp2(_model(seed), reshard) for seed in (0, 1)), DPOConfig(**args), **given
            )
            for reshard in (None, False)
        }
        optimizers = {
            name: torch.optim.AdamW(each.model.parameters(), lr=1e-6) for name, each in {"ODC": ours, **theirs}.items()
        }
        seconds: dict[str, list[float]] = {name: [] for name in ("ODC", *ARMS)}
        loader, of_steps, disturbed = ours.get_train_dataloader(), [], 0
        for number, (packs, chosen) in enumerate(zip(loader, _chosen(ours), strict=False)):
            if number > steps:
                break
            own = [ours.train_dataset[index] for index in chosen[rank * PAIRS :][:PAIRS]]
            for name in in_turn(list(seconds), number):

                def update(name: str = name, packs: Any = packs, own: Any = own) -> None:
                    batch, reshard = ARMS.get(name, (0, "ODC"))
                    if batch:
                        theirs[reshard].update(own, batch)
                    else:
                        ours.training_step(ours.model, packs)
                    optimizers[reshard].step()
                    optimizers[reshard].zero_grad()

                took_s, was_disturbed = timed_together(update)
                if number:  # the first round warms up
                    seconds[name].append(took_s)
                    disturbed += was_disturbed
            if number:
                of_steps.append([lengths[index] for index in chosen])
    dist.destroy_process_group()
    return seconds, of_steps, disturbed


def _chosen(trainer: ODCDPOTrainer) -> list[list[int]]:
    """The pairs of each step, of all ranks, in an order that knows no lengths."""
    sampler = trainer.get_train_dataloader().batch_sampler
    mine = [[index for pack in packs for index in pack] for packs in sampler]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    steps = [sorted(index for of_rank in of_ranks for index in of_rank) for of_ranks in zip(*every, strict=True)]
    for number, step in enumerate(steps):
        random.Random(number).shuffle(step)
    return steps


def main() -> int:
    options = options_of(__doc__, steps=3)
    single_thread_environment()
    cost, rows, start_s = CostModel.from_config(Qwen2Config(**LONG_CONFIG)), [], time.monotonic()
    for case in CASES:
        seconds, of_steps, disturbed = launch(measure, case, options.steps, ranks=RANKS)[0]
        medians = {name: statistics.median(each) for name, each in seconds.items()}
        best = min(ARMS, key=medians.__getitem__)
        bounds = [bound(lengths, ARMS[best][0], cost) for lengths in of_steps]
        gain = median_ratio(seconds[best], seconds["ODC"])
        row = {"case": case, "best": best, "gain": gain, "bound": statistics.median(bounds), "median_s": medians}
        row |= {
            "of_bound": statistics.median(
                theirs / own / limit for theirs, own, limit in zip(seconds[best], seconds["ODC"], bounds, strict=True)
            )
        }
        rows.append(row | {"steps": options.steps, "disturbed": disturbed, "turns": len(seconds) * options.steps})
    took_s = time.monotonic() - start_s
    if options.out is not None:
        command = f"python -m bench.suites.dpo --steps {options.steps}"
        save_parts(options.out, cpu=rows, about={"command": command, "took_s": took_s, **about()})
    shown = [
        [
            row["case"],
            f"{row['gain']['ratio']:.2f} ({row['gain']['low']:.2f} to {row['gain']['high']:.2f})",
            f"{row['bound']:.2f}",
            f"{row['of_bound']:.2f}",
            ", ".join(f"{name} {each:.2f}" for name, each in row["median_s"].items()),
            f"{row['disturbed']} of {row['turns']}",
        ]
        for row in rows
    ]
    print(table(shown, ("", "over the best FSDP2", "bound", "of the bound", "median s of a step", "disturbed")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
