"""Packs by compiled blocks and without: python -m bench.suites.compiled [--packs 32] [--out FILE]

One rank, one thread: the same packs, of different lengths, by both models in turns; the first ones, in which graphs are
compiled, apart. And the graphs of blocks compiled for packs that are padded to eight lengths, in place of any length.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from typing import Any

import torch
from torch._dynamo.utils import counters
from transformers import AutoConfig, AutoModelForCausalLM

from odc_triton import fully_shard, minibatch
from odc_triton.balance import pack_collate
from odc_triton.hf import enable_packing, summed_loss
from odc_triton.jobs.reports.report import table
from odc_triton.jobs.train.model import compile_blocks
from odc_triton.packs.attention import attend_outside_of_graphs

from ..provenance import about, options_of, save_parts

FIRST, LENGTHS, VOCABULARY = 6, 8, 2000
SIZES = {"small": (128, 4, 600), "large": (384, 6, 1500)}  # hidden size, layers, token cap
ROWS = {"small": ("small", False), "large": ("large", False), "large, checkpointed": ("large", True)}


def model_of(size: str, checkpoints: bool, how: str) -> Any:
    hidden, layers, _ = SIZES[size]
    heads = {"num_attention_heads": hidden // 32, "num_key_value_heads": hidden // 64}
    sizes = {"vocab_size": VOCABULARY, "hidden_size": hidden, "intermediate_size": 3 * hidden}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", num_hidden_layers=layers, **heads, **sizes))
    enable_packing(model.train())
    if checkpoints:
        model.activation_checkpointing_enable({"use_reentrant": False})
    if how == "compiled":
        compile_blocks(model)
    elif how == "padded":
        for block in model.model.layers:
            attend_outside_of_graphs(block)
            block.compile(dynamic=False)
    return fully_shard(model)


def pack_of(number: int, cap: int, padded: bool) -> dict[str, Any]:
    draw, samples, left = random.Random(number), [], cap
    for _ in range(draw.randint(1, 6)):
        if (count := draw.randint(16, cap // 2)) <= left:
            samples.append({"input_ids": [draw.randrange(VOCABULARY) for _ in range(count)]})
            left -= count
    rest = (left - cap) % (cap // LENGTHS) * padded
    if rest:
        samples.append({"input_ids": [0] * rest, "labels": [-100] * rest})
    return pack_collate([samples])[0]


def step_s(model: Any, pack: dict[str, Any]) -> tuple[float, float]:
    start_s = time.perf_counter()
    with minibatch(model, tokens=len(pack["target_positions"])) as mb:
        loss = summed_loss(model, pack) / mb.tokens
        loss.backward()
    model.zero_grad()
    return time.perf_counter() - start_s, loss.item()


def compared(size: str, checkpoints: bool, packs: int, how: str = "compiled") -> dict[str, Any]:
    torch._dynamo.reset()
    counters.clear()
    torch._dynamo.config.recompile_limit = 10 * LENGTHS
    models = {each: model_of(size, checkpoints, each) for each in ("plain", how)}
    seconds, differences = [], []
    for number in range(FIRST + packs):
        pack, order = pack_of(number, SIZES[size][2], how == "padded"), [*models][:: 1 if number % 2 else -1]
        (own_s, own), (plain_s, plain) = map({each: step_s(models[each], pack) for each in order}.get, (how, "plain"))
        seconds.append((own_s, plain_s))
        differences.append(abs(own - plain) / abs(plain))
    ratios = [own_s / plain_s for own_s, plain_s in seconds[FIRST:]]
    low, median, high = statistics.quantiles(ratios, n=4)
    return {
        "parameters": sum(each.numel() for each in models["plain"].parameters()),
        "ratio": {"ratio": median, "low": low, "high": high},
        "compiling_s": sum(own_s - plain_s for own_s, plain_s in seconds[:FIRST]),
        "graphs": counters["stats"]["unique_graphs"],
        "most_difference": max(differences),
        "seconds": seconds,
    }


def main() -> int:
    given = options_of(__doc__, packs=32)
    torch.set_num_threads(1)
    found = {name: compared(*row, given.packs) for name, row in ROWS.items()}
    found["padded"] = compared("small", False, given.packs, "padded")
    names = ("parameters", "ratio", "compiling_s", "graphs", "most_difference")
    print(table([[name, *(str(each[key]) for key in names)] for name, each in found.items()], ("model", *names)))
    if given.out is not None:
        save_parts(given.out, about=about(), packs=given.packs, sizes=SIZES, runs=found)
    return int(any(each["most_difference"] > 1e-5 for each in found.values()))


if __name__ == "__main__":
    sys.exit(main())
