"""transformers' Trainer and TRL's under accelerate's FSDP2 and transformers' own; checkpoints across both ways."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.programs.harness import TORCHRUN, Program, accelerate, assert_goes_on, run_both, script


def _options(**options: Any) -> list[str]:
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


# Two orders of one sum differ by some 1e-9, of which SGD makes lr times as much: 8e-9 was seen in most programs, 6e-8
# where it decides how a norm's weight of 1 is rounded. AdamW divides by sqrt(v) + eps: where a gradient is near 0 a
# step makes up to lr / eps = 1000 times as much of it.
OPTIMIZERS = {
    "sgd": (_options(optim="sgd", learning_rate=1e-1), 1e-7),
    "adamw": (_options(optim="adamw_torch", learning_rate=1e-2, adam_epsilon=1e-5), 1e-5),
}
TRAINING = _options(max_steps=6, per_device_train_batch_size=2, gradient_accumulation_steps=4)
EVALUATION = _options(eval_strategy="steps", eval_steps=3, per_device_eval_batch_size=2)
QUIET = _options(report_to="none", logging_steps=1, use_cpu=True)

ACCELERATE, AS_GPUS = accelerate("fsdp2.yaml"), script("cpu_fsdp.py")
TRAINER = [script("trainer.py"), *EVALUATION, *_options(remove_unused_columns=False)]
TRL = [AS_GPUS, script("trl_trainers.py"), *_options(bf16=False)]
GRPO = _options(method="grpo", num_generations=4, num_iterations=2, max_completion_length=8)
PROGRAMS = {
    "Trainer": (ACCELERATE, [AS_GPUS, *TRAINER]),
    "Trainer, its own FSDP2": (TORCHRUN, [*TRAINER, "--own_fsdp2"]),
    "SFTTrainer": (ACCELERATE, [*TRL, *_options(method="sft")]),
    "DPOTrainer": (ACCELERATE, [*TRL, *_options(method="dpo")]),
    "GRPOTrainer": (ACCELERATE, [*TRL, *GRPO]),
}


def _program(name: str, model: Path, optimizer: str, **options: Any) -> Program:
    launcher, words = PROGRAMS[name]
    more = [*OPTIMIZERS[optimizer][0], *_options(model=model, output_dir="{out}", **options)]
    return Program(
        name=f"{name}, {optimizer}",
        words=[*words, *TRAINING, *QUIET, *more],
        launcher=launcher,
        start=model,
        packages=["transformers", "accelerate", "trl"],
    )


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_trains_the_same(name: str, optimizer: str, model: Path, tmp_path: Path) -> None:
    program = _program(name, model, optimizer, save_strategy="no")
    run_both(program, tmp_path).assert_trained(steps=6, within=OPTIMIZERS[optimizer][1])


@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_checkpoints(kind: str, model: Path, tmp_path: Path) -> None:
    """Each way continues from what the other saved after step 3, to the weights of an undisturbed run."""
    saving = replace(
        _program("Trainer", model, "adamw", save_steps=3),
        name=f"Trainer, adamw, checkpoints, {kind}",
        launcher=accelerate("fsdp2.yaml", "--fsdp_state_dict_type", kind),
        weights=["checkpoint-6/pytorch_model_fsdp*"],
    )

    def resume(saved: Path) -> list[str]:
        return _options(resume_from_checkpoint=saved / "checkpoint-3")

    assert_goes_on(saving, tmp_path, resume, within=OPTIMIZERS["adamw"][1])
