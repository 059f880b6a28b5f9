"""Options that can't be: what is said of each. And the factors of the learning-rate schedules."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from odc_triton.jobs.train.model import recomputes_activations
from odc_triton.jobs.train.optimizers import make_schedule
from odc_triton.jobs.train.run import Run
from tests.support import grpo_case, sft_case

HERE = Path(__file__)
SFT: list[tuple[dict[str, Any], str]] = [
    ({"model": "somewhere"}, "either --model"),
    ({"steps": 0}, "--steps is 0"),
    ({"lr": -1.0}, "lr is -1.0"),
    ({"lr_floor": 2.0}, "--lr-floor is 2.0"),
    ({"timeout_minutes": float("inf")}, "--timeout-minutes is inf"),
    ({"token_cap": 1}, "--token-cap is 1"),
    ({"epochs": 2.0}, "--steps is 5 and --epochs is 2.0; give one"),
    ({"drop_long": True}, "--truncate is True and --drop-long is True; give one of them"),
    ({"eval_data": "a", "eval_fraction": 0.5}, "give one of them"),
    ({"eval_every": 5}, "nothing to evaluate on: give --eval-data"),
    ({"early_stopping": -1}, "--early-stopping is -1; it must be at least 0"),
    (
        {"early_stopping": 2, "eval_every": 5},
        "--early-stopping is 2 and compares evaluations: give --eval-data or --eval-fraction, or",
    ),
    (
        {"keep_best": True},
        "--keep-best is True and compares evaluations: give --eval-data or --eval-fraction and --eval-every, or",
    ),
    ({"keep_best": True, "eval_fraction": 0.5}, "compares evaluations: give --eval-every, or leave it out"),
    ({"eval_fraction": 1.0}, "--eval-fraction is 1.0"),
    ({"lora_alpha": 8.0}, "--lora-alpha is 8.0: give --lora-rank too"),
    ({"lora_targets": "q_proj"}, "--lora-targets is q_proj: give --lora-rank too"),
    ({"tokenizer": None}, "init has no tokenizer"),
    ({"data": ("a", "missing.jsonl")}, "--data is missing.jsonl: there is no such file"),
    ({"data": ()}, "--data is missing: give at least one"),
    (
        {"data": ("a", "b"), "data_weight": (1.0,)},
        "--data-weight is given 1 times and --data 2 times: give one weight for each",
    ),
    ({"timeout_minutes": 1e10}, r"--timeout-minutes is 1e\+10; give at most 525600, a year"),
    ({"data": ("a", "b"), "data_weight": (1.0, -1.0)}, "--data-weight is -1.0; it must be positive and finite"),
    ({"data_weight": (2.0,)}, "--data-weight is 2.0, and a single --data needs none"),
    ({"replicas": 0}, "replicas is 0"),
    ({"checkpoint_every": -1}, "--checkpoint-every is -1"),
    ({"out": 5}, "--out is 5; give a path"),
    ({"resume": ""}, "resume is empty"),
    (
        {"split_sequences": True, "balance": "micro"},
        "--split-sequences goes with --balance mini or queue; it is micro",
    ),
    ({"split_tokens": 9}, "--split-tokens is 9: give --split-sequences too"),
    ({"split_cuts": 3}, "--split-cuts is 3: give --split-sequences too"),
    ({"expert_cache": 9}, "--expert-cache is 9: give --replace-layers too"),
    ({"offload_activations": True}, "--offload-activations is True: give --gradient-checkpointing too"),
    ({"teacher_beta": 1.0}, "--teacher-beta is 1.0: give --teacher too"),
    ({"teacher": "t", "teacher_weight": 1.5}, "--teacher-weight is 1.5; it must be between 0 and 1"),
    ({"router_aux_loss": -1.0}, "--router-aux-loss is -1.0; it must be at least 0"),
    ({"run_name": "a"}, "--run-name is a: give --report-to too"),
    ({"report_to": ("comet",)}, "--report-to is 'comet'; give one of tensorboard, wandb, trackio, mlflow, swanlab"),
    ({"report_to": ("none", "wandb")}, "--report-to is none and wandb: give none alone"),
    ({"hub_private": True}, "--hub-private is True: give --push-to-hub too"),
]
GRPO: list[tuple[dict[str, Any], str]] = [
    ({"reward": ("vowels",)}, "give module:function"),
    ({"reward": ("a:b", "a:c"), "reward_weight": (1.0,)}, "one weight for each reward"),
    ({"reward_weight": (math.nan,)}, "--reward-weight is nan; it must be finite"),
    ({"reward_weight": (-math.inf,)}, "--reward-weight is -inf; it must be finite"),
    ({"reward": ()}, "--reward is missing"),
    ({"reward_timeout_s": 0.0}, "--reward-timeout-s is 0.0; it must be positive"),
    ({"generations": 1}, "at least 2"),
    ({"generations": 1, "scale_rewards": "batch"}, "at least 2"),
    ({"reward": (), "teacher": "t", "kl": 0.1}, "--kl is 0.1: it is a part of the loss of rewards"),
    ({"loss": "cispo"}, "give --clip-high 5"),
    ({"overlap_rollout": "on", "iterations": 2}, "--iterations is 2: later updates need the first one's"),
    ({"overlap_rollout": "on", "scale_rewards": "batch"}, "--scale-rewards is batch: the deviation is that of all"),
    ({"kl": 0.1, "lora_rank": 2}, "other weights for the reference model: give --model"),
    ({"engine": "vllm-server"}, "--vllm-server ADDRESS together"),
    ({"engine": "vllm-colocate"}, "give --model"),
    ({"temperature": 0.0}, "temperature is 0.0; it must be positive"),
    ({"vllm_memory": 1.5}, "between 0 and 1"),
    (
        {"reward": (), "teacher": "t", "teacher_weight": 1.0, "keep_best": True, "eval_every": 1, "eval_data": "a"},
        "--keep-best is True and compares eval_reward: give --reward, or leave it out",
    ),
    ({"eval_samples": 2}, "--eval-samples is 2 and there is no --eval-data: give it"),
]


@pytest.mark.parametrize(
    ("case", "changes", "said"),
    [(each, *row) for each, rows in ((sft_case.case, SFT), (grpo_case.case, GRPO)) for row in rows],
)
def test_refused(case: Any, changes: dict[str, Any], said: str) -> None:
    files = {"data": str(HERE)}  # as if it were one
    with pytest.raises(ValueError, match=said):
        case(HERE.parent, **files | changes)


@pytest.mark.parametrize(
    ("changes", "wanted"),  # factors at these steps of 110
    [
        ({}, {0: 0.1, 4: 0.5, 9: 1.0, 10: 1.0, 60: 0.55, 109: 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 0.99))}),
        ({"lr_floor": 0.0}, {0: 0.1, 9: 1.0, 60: 0.5}),
        ({"schedule": "linear"}, {0: 0.1, 9: 1.0, 10: 1.0, 60: 0.5, 109: 0.01}),
        ({"schedule": "constant"}, {0: 0.1, 9: 1.0, 60: 1.0, 109: 1.0}),
        ({"schedule": "wsd"}, {9: 1.0, 98: 1.0, 99: 1.0, 109: 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 10 / 11))}),
        ({"warmup_steps": 0}, {0: 1.0, 55: 0.55}),
        ({"warmup_steps": 110}, {0: 1 / 110, 109: 1.0}),
    ],
)
def test_schedules(changes: dict, wanted: dict[int, float]) -> None:
    options = sft_case.case(HERE.parent, data=str(HERE), **{"warmup_steps": 10} | changes)
    factor = make_schedule(options, 110)
    assert {step: factor(step) for step in wanted} == pytest.approx(wanted)


@pytest.mark.parametrize(("steps", "said"), [(10, ", all of them warm-up"), (29, ", 10 of them warm-up"), (30, ",")])
def test_a_long_warm_up_is_said(steps: int, said: str) -> None:
    engine = SimpleNamespace(world=1, heap=SimpleNamespace(device=torch.device("cpu")))
    options = sft_case.case(HERE.parent, data=str(HERE), warmup_steps=10)
    run: Any = SimpleNamespace(options=options, model=torch.nn.Linear(1, 1), engine=engine, steps=steps)
    option = " (--warmup-steps is 10)," if "warm-up" in said else " checkpoints"
    assert f"steps: {steps}{said}{option}" in Run.in_words(run)


@pytest.mark.parametrize(
    ("changes", "overlaps"),
    [
        ({}, True),
        ({"overlap_rollout": "off"}, False),
        ({"iterations": 2}, False),
        ({"scale_rewards": "batch"}, False),
        ({"exact": True}, False),
        ({"exact": True, "overlap_rollout": "on"}, True),
    ],
)
def test_rollouts_overlap_where_they_can(changes: dict[str, Any], overlaps: bool) -> None:
    options = grpo_case.case(HERE.parent, data=str(HERE), **{"overlap_rollout": "auto"} | changes)
    assert options.overlaps == overlaps


def test_one_tracker_needs_no_tuple() -> None:
    assert sft_case.case(HERE.parent, data=str(HERE), report_to="wandb", run_name="a").report_to == ("wandb",)


def test_what_is_chosen_by_the_device() -> None:
    """The dtype; and that activations are recomputed, where those of a pack would take 4.95 GB or more of 16."""
    on = {"data": str(HERE), "token_cap": 4096}
    config = AutoConfig.for_model("qwen2", hidden_size=840, num_hidden_layers=24)
    for changes, device, gb, wanted in [
        ({}, "cuda", 24, False),
        ({}, "cuda", 16, True),
        ({"token_cap": 8192}, "cuda", 24, True),
        ({"dtype": "fp32"}, "cuda", 24, True),
        ({"gradient_checkpointing": False}, "cuda", 16, False),
        ({"gradient_checkpointing": True}, "cuda", 24, True),
        ({}, "cpu", 0, False),
    ]:
        options = sft_case.case(HERE.parent, **on | changes).on(device)
        assert options.dtype == changes.get("dtype", "bf16" if device == "cuda" else "fp32")
        found, said = recomputes_activations(config, options, int(gb * 1e9))
        assert found == wanted, (changes, gb)
        assert ("--no-gradient-checkpointing turns it off" in said) == (
            found and "gradient_checkpointing" not in changes
        )
