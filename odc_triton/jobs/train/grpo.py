"""Reinforcement learning by GRPO with on-demand communication.

odc-triton train grpo --data PROMPTS --reward MODULE:FUNCTION --model FOLDER --out DIR --ranks 2
torchrun --nproc-per-node 2 -m odc_triton.train.grpo --data PROMPTS --reward MODULE:FUNCTION --model FOLDER --out DIR
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ...checkpoint.adapted import read_config
from ...engine.api import engine_of
from ...packs.enable import innermost
from ..rl.generation import CompletionEngine
from ..rl.importance import Importance
from ..rl.named_rewards import ACCURACY, without_answer
from ..rl.prompts import Prompts, joined_prompts, read_prompts
from ..rl.rewards import Rewards
from ..rl.transformers_engine import TransformersEngine
from ..rl.turns import find_rollout
from ..rl.vllm_colocate import VllmColocate
from ..rl.vllm_server import VllmServer
from ..vllm.policy_server import PolicyServer
from . import prepare as preparing
from .grpo_options import GrpoOptions
from .grpo_run import GrpoRun
from .job import OnMetrics, Sharded, load_frozen, load_teacher, main_of, run_job, train
from .metrics import Metrics
from .prepare import Prepared, load_any_tokenizer, mix_of, take_folder
from .run_folder import RunFolder

_PROMPTS = 16  # of each source that are checked before the start
_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}  # of compute, as vLLM has to have them


def train_grpo(options: GrpoOptions, on_metrics: OnMetrics | None = None) -> Metrics:
    """Trains to the end on this rank. Every rank of the job calls it.

    Rank 0's output is as in `train_sft`. A stop during a rollout abandons the step.

    options: those of the command.
    on_metrics: as in `train_sft`.

    Returns the last metrics. Raises RolloutFailed on all ranks if sampling or a reward function raised on any, and as
    `train_sft`.
    """
    return train(options, prepare, _start, on_metrics)


def check_before_start(options: GrpoOptions, ranks: int) -> None:
    """Raises OSError and ValueError for errors that would occur later in the run. Leaves only the folder `out`."""
    options.require_replicas(options.replicas or 1, ranks)
    tokenizer = load_any_tokenizer(options)
    world = ranks // (options.replicas or 1)
    found = _read(options, tokenizer, world, first=_PROMPTS)
    largest = _largest(options, tokenizer, found)
    if options.vllm_server is not None:
        if torch.cuda.is_available():
            raise ValueError(
                "--engine is vllm-server, which reads the policy from shared memory, and not from GPUs yet: give "
                "--engine vllm-colocate"
            )
        config = read_config(options.architecture)
        server = PolicyServer(options.vllm_server)
        server.check(config=config, dtype=_DTYPES[options.on("cpu").dtype], tokens=largest["longest"])
    rewards = _rewards(options)
    try:
        try:
            rewards.check(*_columns(options, found))
        except ValueError:  # later prompts may have more
            rewards.check(*_columns(options, _read(options, tokenizer, world)))
    finally:
        rewards.close()
    if options.rollout is not None:
        find_rollout(options.rollout)
    preparing.check_before_start(options, ranks, tokenizer, **largest)


def prepare(options: GrpoOptions, *, mesh: DeviceMesh) -> Prepared[Prompts]:
    """Rank 0 takes the folder; every rank reads the prompts. Collective."""
    tokenizer, world, shards = load_any_tokenizer(options), mesh.size(), mesh.size(mesh.ndim - 1)

    def read(folder: RunFolder) -> dict[str, Any]:
        found = _read(options, tokenizer, shards)
        for prompts, use in zip(found, [*["to learn from"] * len(options.data), "to evaluate on"], strict=False):
            left_out = f", {prompts.dropped} left out as too long" if prompts.dropped else ""
            print(
                f"{prompts.name}: {len(prompts)} prompts {use}, at most {prompts.longest} tokens{left_out}", flush=True
            )
            if ACCURACY in options.reward and (said := without_answer([each.columns for each in prompts])):
                print(f"{prompts.name}: {said}", flush=True)
        if options.overlap_rollout == "auto" and options.needs_phases is not None:
            print(f"all completions are sampled before the update: {options.needs_phases}", flush=True)
        return {"prepared": [each.digest() for each in found]}

    with take_folder(options, read, mesh=mesh) as (taken, folder):
        found = _read(options, tokenizer, shards)
        if [each.digest() for each in found] != taken["identity"]["prepared"]:
            raise ValueError(
                f"{', '.join(options.data)} is not the same here as on rank 0: give all ranks the same files"
            )
        learned, evaluation = found[: len(options.data)], found[len(options.data) :]
        mix = mix_of(options, [len(each) for each in learned], world)
        return Prepared(
            tokenizer=tokenizer,
            data=joined_prompts(learned, mix.copies),
            evaluation=evaluation[0] if evaluation else None,
            mix=mix,
            identity=taken["identity"],
            folder=folder,
            **taken["before"],
            **_largest(options, tokenizer, found),
        )


def _largest(options: GrpoOptions, tokenizer: Any, found: list[Prompts]) -> dict[str, int]:
    """The longest sample and the largest token that the model must accept."""
    return {
        "longest": max(each.longest for each in found) + options.max_new_tokens,
        "largest_token": max(*(each.largest_token for each in found), tokenizer.eos_token_id),
    }


def _read(options: GrpoOptions, tokenizer: Any, ranks: int, *, first: int = 0) -> list[Prompts]:
    """The prompts of each --data, and of --eval-data if any. `ranks`: of a replica."""
    most_tokens = options.most_tokens(ranks) - options.max_new_tokens
    how = {"most_tokens": most_tokens, "drop_long": options.drop_long, "first": first}
    how |= {"columns": options.columns}
    return [read_prompts(name, tokenizer, **how) for name in (*options.data, options.eval_data) if name]


def _columns(options: GrpoOptions, found: list[Prompts]) -> list[list[str] | None]:
    """What reward functions are given of the prompts to learn from, and of those to evaluate on if there are any; None
    where it may be more.
    """
    sets = [each for each in (found[: len(options.data)], found[len(options.data) :]) if each]
    known = [options.rollout is None and all(map(len, of)) for of in sets]
    return [
        sorted({name for each in of for name in each.columns}) if is_known else None
        for of, is_known in zip(sets, known, strict=True)
    ]


def _rewards(options: GrpoOptions) -> Rewards:
    limits = {"timeout_s": options.reward_timeout_s, "max_new_tokens": options.max_new_tokens}
    return Rewards(options.reward, weights=options.reward_weight or None, **limits)


def _start(options: GrpoOptions, sharded: Sharded, prepared: Prepared[Prompts]) -> GrpoRun:
    reference = load_frozen(options, sharded) if options.kl else None
    teacher = load_teacher(options, sharded)
    model, cost = sharded(options)

    def should_stop() -> bool:
        run.stop_signal.check_peers()
        return run.stop_signal.signal is not None

    completions = _engine(options, model, should_stop)
    importance = Importance(mode=options.importance, most=options.importance_cap)
    run = GrpoRun(
        options=options,
        model=model,
        prepared=prepared,
        reference=reference,
        teacher=teacher,
        completions=completions,
        correction=importance if completions.samples_elsewhere else None,
        rewards=_rewards(options),
        cost=cost,
    )
    return run


def _engine(options: GrpoOptions, model: nn.Module, should_stop: Callable[[], bool]) -> CompletionEngine:
    engine = engine_of(model)
    if options.vllm_server is not None:
        return VllmServer(options.vllm_server, timeout_s=60 * options.timeout_minutes)
    if options.engine == "vllm-colocate":
        longest = options.most_tokens(engine.grid.shards)
        positions = getattr(innermost(model).config.get_text_config(), "max_position_embeddings", longest)
        given = {"memory": options.vllm_memory, "max_tokens": min(longest, positions), "lora_rank": options.lora_rank}
        return VllmColocate(options.model, rank=engine.rank, dtype=_DTYPES[options.dtype], **given)
    return TransformersEngine(model, should_stop=should_stop)


run_grpo = partial(run_job, train_grpo)
main = partial(main_of, GrpoOptions, run_grpo)
