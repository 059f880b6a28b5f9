"""Long sequences over few ranks: memory by length and number of layers, time compared with buffers for all layers,
and the plan of Qwen3-8B with a million tokens.

    python -m bench.suites.long_context --out bench/results/long_context.json

`cpu`: one sample as a zigzag over the ranks, with activation checkpointing, MLPs and norms in chunks and a fused head.
`peak_bytes`: of the fullest rank: the most that a step takes of private memory above what the process had after a step
on a short sample; the optimizer's states; the rank's part of what is shared, as allocated. `peak_over_plan`: over those
of `memory_plan`.
`timed`: `seconds_over_all_layers` is the median over interleaved steps of two models that differ in `layers_in_flight`
alone.
`sample`: `train sft` on one text of 65,536 tokens.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import Qwen3Config, Qwen3ForCausalLM

from odc_triton import enable_split, fully_shard, minibatch, replace_layers
from odc_triton.balance import CostModel, PackedDataset, pack_collate
from odc_triton.engine.api import engine_of
from odc_triton.hf import compute_in_chunks, enable_packing, summed_loss
from odc_triton.jobs.launcher.launch import launch
from odc_triton.plan.line import LEAST_TOKENS
from odc_triton.plan.planner import SPLIT, make_plan
from odc_triton.plan.samples import Limits, Samples
from odc_triton.sequence.exchange import SequenceExchange
from odc_triton.tools.memory.footprint import memory_plan

from ..harness import PeakMemory, gather, in_turn, median_ratio, open_job, single_thread_environment
from ..provenance import options_of, save_measured, save_parts
from ..stdlib_corpus import build_corpus, write_text

BASE, FACTORS, LAYERS, WORLDS = 1536, (1, 2, 4, 8), (4, 8, 16), (2, 4)  # BASE: tokens of each rank
CHUNK = 256  # tokens: few compared with a rank's
SHORT = 512
TIMED_LAYERS, TIMED_FACTOR = (4, 8), 2
MILLION, GPUS = 1 << 20, 8
_CONFIG = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
_CONFIG |= {"intermediate_size": 384, "vocab_size": 512, "tie_word_embeddings": False}
_QWEN3_8B = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
_QWEN3_8B |= {"intermediate_size": 12288, "vocab_size": 151936, "num_hidden_layers": 36, "tie_word_embeddings": False}
_TEXT = {"model_type": "qwen3", "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 64}
_TEXT |= {"num_key_value_heads": 2, "intermediate_size": 768, "vocab_size": 4096, "max_position_embeddings": 65_536}
_PARTS = {
    "parameters": ("compute_shard_bytes", "gathered_bytes"),
    "masters and optimizer states": ("master_shard_bytes", "optimizer_state_bytes"),
    "gradients": ("gradient_shard_bytes", "transient_gradient_bytes", "gradient_cast_bytes"),
    "keys and values that others read": ("split_bytes",),
    "activations": ("activation_bytes",),
}


def build(layers: int, device: str = "cpu") -> nn.Module:
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen3ForCausalLM(Qwen3Config(**_CONFIG, num_hidden_layers=layers, max_position_embeddings=1 << 20))
    if device == "cpu":
        enable_packing(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    replace_layers(model, roles=["head"], verbose=False)
    compute_in_chunks(model, CHUNK)
    return model.train()


def packs_of(length: int, rank: int, world: int) -> Any:
    cost, tokens = CostModel.from_config(Qwen3Config(**_CONFIG)), -(-length // world) + LEAST_TOKENS
    limits = Limits(ranks=world, token_cap=tokens, split_tokens=tokens)
    plan = make_plan(Samples.of(limits.checked([length]), cost), limits, SPLIT)
    ids = torch.randint(3, _CONFIG["vocab_size"], (length,), generator=torch.Generator().manual_seed(1))
    return pack_collate(PackedDataset([{"input_ids": ids, "labels": ids.clone()}]).__getitems__(plan.packs(rank)))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, packs: Any) -> float:
    """Seconds, from barrier to barrier."""
    dist.barrier()
    start_s = time.monotonic()
    with minibatch(model, plan=packs) as mb:
        for pack in packs:
            (summed_loss(model, pack) / mb.tokens).backward()
    optimizer.step()
    optimizer.zero_grad()
    dist.barrier()
    return time.monotonic() - start_s


def split_tokens(packs: Any) -> int:
    return max(packs.split.tokens)


def peak(layers: int, length: int) -> dict[str, float]:
    """Collective."""
    rank, world = open_job()
    packs, watch = packs_of(length, rank, world), PeakMemory(every_s=0.005)
    tokens = split_tokens(packs)
    model = fully_shard(build(layers))
    enable_split(model, tokens=tokens)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(2):
        step(model, optimizer, packs_of(SHORT, rank, world))
    gc.collect()
    before, _ = watch.read()
    with watch:
        step(model, optimizer, packs)
    states = (each for of in optimizer.state.values() for each in of.values())
    kept = sum(getattr(each, "to_local", lambda each=each: each)().nbytes for each in states)
    engine = engine_of(model)
    shared = (engine.heap.size_bytes + engine.participant(SequenceExchange).buffers.heap.size_bytes) // world
    found = gather(watch.private_bytes - before + kept)
    dist.destroy_process_group()
    own = max(sum(len(each.segment) for each in packs.split.segments if each.rank == of) for of in range(world))
    plan = memory_plan(
        build(layers, "meta"), world, tokens_per_microbatch=own, gradient_checkpointing=True, split_tokens=tokens
    )
    return {
        "ranks": world,
        "layers": layers,
        "factor": length // (BASE * world),
        "tokens": length,
        "peak_bytes": max(found) + shared,
        "private_bytes": max(found),
        "plan_bytes": plan.total_bytes,
        "checkpoint_bytes": layers * own * 4 * _CONFIG["hidden_size"],
        "parameter_bytes": plan.total_bytes - plan.activation_bytes - plan.split_bytes,
        "peak_over_plan": (max(found) + shared) / plan.total_bytes,
    }


def timed(layers: int, length: int, steps: int) -> dict[str, float]:
    """Collective."""
    rank, world = open_job()
    packs, ways = packs_of(length, rank, world), []
    for in_flight in (None, layers):
        model = fully_shard(build(layers))
        enable_split(model, tokens=split_tokens(packs), layers_in_flight=in_flight)
        ways.append(partial(step, model, torch.optim.AdamW(model.parameters(), lr=1e-4), packs))
        ways[-1]()
    took: list[list[float]] = [[], []]
    for number in range(steps):
        for way in in_turn([0, 1], number):
            took[way].append(ways[way]())
    dist.destroy_process_group()
    return {
        "ranks": world,
        "layers": layers,
        "tokens": length,
        "steps": steps,
        "seconds": statistics.median(took[0]),
        "seconds_over_all_layers": median_ratio(*took)["ratio"],
        "interval": [median_ratio(*took)[end] for end in ("low", "high")],
    }


def qwen3_8b_million() -> dict[str, object]:
    """GB (10^9 bytes) of each of 8 GPUs for one sample as a zigzag, by `memory_plan`."""
    with torch.device("meta"):
        model = Qwen3ForCausalLM(Qwen3Config(**_QWEN3_8B, max_position_embeddings=MILLION))
    replace_layers(model, roles=["embedding", "head"], verbose=False)
    policy, own = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32), MILLION // GPUS
    how = {"tokens_per_microbatch": own, "gradient_checkpointing": True, "split_tokens": own}
    plans = [
        memory_plan(model, GPUS, mp_policy=policy, backend="cuda", **how, offload_checkpoints=offload)
        for offload in (True, False)
    ]
    parts = {name: sum(getattr(plans[0], each) for each in of) / 1e9 for name, of in _PARTS.items()}
    return {
        "gb_per_gpu": plans[0].total_bytes / 1e9,
        "parts": parts,
        "host_gb_per_gpu": plans[0].offloaded_bytes / 1e9,
        "gb_per_gpu_without_offloading": plans[1].total_bytes / 1e9,
    }


def peaks() -> list[dict[str, float]]:
    rows = []
    for world, layers, factor in product(WORLDS, LAYERS, FACTORS):
        rows.append(launch(peak, layers, BASE * world * factor, ranks=world)[0])
        print({key: round(value, 3) for key, value in rows[-1].items()}, flush=True)
    return rows


def times(steps: int) -> list[dict[str, float]]:
    rows = []
    for world, layers in product(WORLDS, TIMED_LAYERS):
        rows.append(launch(timed, layers, BASE * world * TIMED_FACTOR, steps, ranks=world)[0])
        print(rows[-1], flush=True)
    return rows


def sample() -> dict[str, object]:
    """`train sft` on one text of 65,536 tokens, and a short one, on two ranks, with its progress on stderr."""
    with TemporaryDirectory() as folder:
        records, _ = build_corpus()
        write_text(Path(folder), records, _TEXT)
        text = "".join(each["prompt"] + each["completion"] for each in records)
        lines = [{"text": text}, {"text": text[:400]}]
        Path(folder, "data.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
        command = [sys.executable, "-m", "odc_triton.tools.cli", "train", "sft", "--ranks", "2", "--steps", "3"]
        command += ["--data", f"{folder}/data.jsonl", "--init", f"{folder}/config.json", "--out", f"{folder}/run"]
        command += ["--tokenizer", f"{folder}/tokenizer.json", "--token-cap", "32768", "--truncate"]
        command += ["--samples-per-rank", "1", "--split-sequences", "--gradient-checkpointing", "--offload-activations"]
        start_s = time.monotonic()
        subprocess.run(command, check=True)
        steps = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    names = ("step", "loss", "grad_norm", "seconds", "idle", "offloaded_bytes")
    kept = [{name: each[name] for name in names} for each in steps]
    return {"tokens": 65_536, "layers": 4, "hidden": 256, "steps": kept, "took_s": time.monotonic() - start_s}


def main() -> None:
    options = options_of(__doc__, only=("cpu", "timed", "sample"), steps=12)
    if options.out is None:
        sys.exit("give --out FILE")
    single_thread_environment()
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # what is freed leaves the process
    save_parts(options.out, qwen3_8b_million=qwen3_8b_million())
    parts: dict[str, Callable[[], object]] = {"cpu": peaks, "timed": partial(times, options.steps), "sample": sample}
    for name in options.only:
        start_s = time.monotonic()
        save_measured(options.out, start_s, **{name: parts[name]()})


if __name__ == "__main__":
    main()
