"""Supervised fine-tuning on packed sequences by on-demand communication.

odc-triton train sft --data FILE --model FOLDER --out DIR --ranks 2
torchrun --nproc-per-node 2 -m odc_triton.train.sft --data FILE --model FOLDER --out DIR
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from tqdm import tqdm

from odc_triton.api import engine_of, minibatch
from odc_triton.balance import CostModel, MinibatchSampler
from odc_triton.balance.collate import Pack, count_target_tokens, pack_collate, to_device
from odc_triton.checkpoint import load_causal_lm, save_pretrained
from odc_triton.hf import enable_packing, summed_loss
from odc_triton.options import add_arguments, read_options
from odc_triton.sharding import default_mesh, fully_shard
from odc_triton.trace import save_trace
from odc_triton.train.data import DataOptions, TokenizedDataset, tokenize_file
from odc_triton.train.options import SftOptions
from odc_triton.train.schedule import warmup_cosine
from odc_triton.train.state import RunState
from odc_triton.train.tokenizer import END, TextEncoder, load_tokenizer, to_transformers


class SftRun:
    """One rank's side of a run: model, optimizer, samples and where it stands."""

    def __init__(
        self, *, options: SftOptions, model: nn.Module, data: TokenizedDataset, cost: CostModel | None = None
    ) -> None:
        """`model` is sharded already, and packing was enabled on it before that."""
        self.options, self.model, self.data = options, model, data
        self.engine = engine_of(model)
        self.state = RunState()
        self.optimizer = torch.optim.AdamW(
            [parameter for parameter in model.parameters() if parameter.requires_grad],
            lr=options.lr,
            weight_decay=options.weight_decay,
        )
        self.sampler = MinibatchSampler(
            data.lengths.tolist(),
            options.samples_per_rank,
            options.token_cap,
            balance=options.balance,
            seed=options.seed,
            rank=self.engine.rank,
            world=self.engine.world,
            cost=cost,
            drop_last=True,
        )
        self._epoch = iter(self.sampler)

    def next_packs(self) -> list[Pack]:
        """This rank's packs of the next minibatch, over as many epochs as it takes."""
        packs = next(self._epoch, None)
        if packs is None:
            self._epoch = iter(self.sampler)
            packs = next(self._epoch)
        return pack_collate([[self.data[index] for index in pack] for pack in packs])

    def train_step(self) -> dict[str, float]:
        """One minibatch and one optimizer step; returns metrics of all ranks together, the same on every rank."""
        options, state = self.options, self.state
        start_s = time.monotonic()
        packs = self.next_packs()
        factor = warmup_cosine(
            state.step, steps=options.steps, warmup_steps=options.warmup_steps, floor=options.lr_floor
        )
        for group in self.optimizer.param_groups:
            group["lr"] = options.lr * factor
        device = self.engine.heap.device
        loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        with minibatch(self.model, tokens=count_target_tokens(packs)) as mb:
            for pack in packs:
                loss = summed_loss(self.model, to_device(pack, device))
                (loss / mb.tokens).backward()
                loss_sum += loss.detach()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), options.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.all_reduce(loss_sum)
        state.step += 1
        state.tokens += mb.tokens
        state.sampler = self.sampler.state_dict()
        state.capture_rng()
        took_s = time.monotonic() - start_s
        return {
            "step": state.step,
            "loss": loss_sum.item() / mb.tokens,
            "lr": options.lr * factor,
            "grad_norm": float(norm.full_tensor()),
            "tokens": state.tokens,
            "target_tokens_per_s": mb.tokens / took_s,
            "seconds": took_s,
        }


def train_sft(options: SftOptions, on_metrics: Callable[[dict], None] | None = None) -> dict[str, float]:
    """Runs to the end on this rank and returns the last metrics. Every rank of the job calls it.

    Rank 0 shows progress, calls `on_metrics` after each step, and writes into `options.out`: metrics.jsonl, the
    last minibatches' trace.json, and the trained model for plain transformers.
    """
    timeout = timedelta(minutes=options.timeout_minutes)
    mesh = default_mesh(timeout)
    out, rank = Path(options.out), mesh.get_rank()
    tokenizer = _load_tokenizer(options)
    data = _prepare_data(options, tokenizer, out, rank)
    torch.manual_seed(options.seed)
    if len(data) < options.samples_per_rank * mesh.size():
        raise ValueError(
            f"{options.data} has {len(data)} samples and one step takes {options.samples_per_rank} on each of "
            f"{mesh.size()} ranks: lower --samples-per-rank, or give more data"
        )
    model = load_causal_lm(model=options.model, init=options.init)
    _check_fit(model, data, options)
    cost = CostModel.from_config(model.config.get_text_config())
    enable_packing(model)
    _replace_layers(model, options, rank)
    if options.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if options.dtype == "bf16" else None
    model = fully_shard(model, mesh=mesh, mp_policy=policy, timeout=timeout)
    torch.manual_seed(options.seed + rank)  # dropout differs between ranks
    run = SftRun(options=options, model=model, data=data, cost=cost)
    metrics = _train(run, out, rank, on_metrics)
    if rank == 0:
        _finish(run, out, tokenizer, metrics)
    dist.barrier()  # rank 0 still reads the others' shards
    return metrics


def _replace_layers(model: nn.Module, options: SftOptions, rank: int) -> None:
    from odc_triton.replace import replace_layers

    roles = ["attention", "embedding", "linear"] if options.replace_layers else []
    if options.fused_head:
        roles.append("head")
    replaced = replace_layers(model, roles=roles, verbose=bool(roles) and rank == 0)
    if options.fused_head and not replaced.swapped["head"]:
        raise ValueError(
            f"--fused-head: {options.model or options.init} has a head that can't be fused ("
            f"{'; '.join(f'{name}: {why}' for name, why in replaced.left.items())}); leave it out"
        )


def _train(run: SftRun, out: Path, rank: int, on_metrics: Callable[[dict], None] | None) -> dict[str, float]:
    metrics: dict[str, float] = {}
    bar = tqdm(total=run.options.steps, unit="step", disable=None if rank == 0 else True)  # None: quiet without a tty
    with open(out / "metrics.jsonl" if rank == 0 else os.devnull, "w", encoding="utf-8") as lines:
        while run.state.step < run.options.steps:
            metrics = run.train_step()
            lines.write(json.dumps(metrics) + "\n")
            lines.flush()
            bar.update()
            bar.set_postfix(loss=f"{metrics['loss']:.4f}", tokens_per_s=f"{metrics['target_tokens_per_s']:.0f}")
            if rank == 0 and on_metrics is not None:
                on_metrics(metrics)
    bar.close()
    return metrics


def _finish(run: SftRun, out: Path, tokenizer: Any, metrics: dict[str, float]) -> None:
    save_trace({"this rank": run.engine.events.drain()}, out / "trace.json")
    save_pretrained(run.model, out / "model", tokenizer)
    print(f"{metrics['step']} steps, loss {metrics['loss']:.4f}; metrics, trace and model are in {out}")


def _load_tokenizer(options: SftOptions) -> Any:
    """A transformers tokenizer, or this project's own from a tokenizer.json."""
    source = options.tokenizer or options.model
    if source is None:
        raise ValueError("--init has no tokenizer: give --tokenizer, a folder, a hub id or a tokenizer.json")
    if Path(source).suffix == ".json":
        tokenizer = load_tokenizer(source)
        if tokenizer.token_to_id(END) is None:
            raise ValueError(
                f"{source} has no {END} token, so this project did not make it: give the folder of its model, where "
                f"tokenizer_config.json names its special tokens"
            )
        return to_transformers(tokenizer)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(source)


def _prepare_data(options: SftOptions, tokenizer: Any, out: Path, rank: int) -> TokenizedDataset:
    """Rank 0 reads and tokenises the file once; the others load what it wrote."""
    prepared = out / "data.npz"
    problem: list[Any] = [None]
    if rank == 0:
        try:
            if (out / "metrics.jsonl").exists():
                raise FileExistsError(f"{out} holds another run's metrics.jsonl; give another --out, or remove it")
            out.mkdir(parents=True, exist_ok=True)
            data = tokenize_file(options.data, TextEncoder.of(tokenizer), DataOptions(max_tokens=options.token_cap))
            data.save(prepared)
            print(f"{options.data}: {data.summary}", flush=True)
        except (OSError, ValueError) as error:
            problem = [error]
    dist.broadcast_object_list(problem)
    if problem[0] is not None:
        raise problem[0]
    return TokenizedDataset.load(prepared)


def _check_fit(model: nn.Module, data: TokenizedDataset, options: SftOptions) -> None:
    """Raises for samples that the model can't take: tokens it does not know, more of them than it has places for."""
    config = model.config.get_text_config()
    largest, longest = int(data.tokens.max()), int(data.lengths.max())
    if largest >= config.vocab_size:
        raise ValueError(
            f"the tokenizer made token {largest} and the model knows {config.vocab_size} (vocab_size): give the "
            f"model's own --tokenizer, or a larger vocab_size in --init"
        )
    places = getattr(config, "max_position_embeddings", None)
    if places is not None and longest > places:
        raise ValueError(
            f"the longest sample has {longest} tokens and the model is made for {places} "
            f"(max_position_embeddings): set --token-cap {places}, which cuts longer samples off"
        )


def run_sft(options: SftOptions) -> dict[str, float]:
    """`train_sft` in a process of its own, which the launcher started."""
    try:
        return train_sft(options)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def main(arguments: list[str] | None = None) -> None:
    """What every rank runs under `torchrun -m odc_triton.train.sft`."""
    parser = argparse.ArgumentParser(prog="odc_triton.train.sft", description=SftOptions.__doc__)
    add_arguments(parser, SftOptions)
    try:
        options = read_options(SftOptions, parser.parse_args(arguments))
    except ValueError as error:
        parser.error(str(error))
    run_sft(options)


if __name__ == "__main__":
    main()
