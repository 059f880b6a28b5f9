"""The optimizers of `--optimizer`, and the learning-rate schedules of `--schedule`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ...engine.api import engine_of
from ...optim import AdamW8bit, ChainedOptimizer, Muon
from .run_options import RunOptions


def make_optimizer(model: nn.Module, options: RunOptions) -> Optimizer:
    """The run's optimizer of a sharded model; all groups have the same learning rate.

    Raises ValueError if Muon has no matrix to step.
    """
    how: dict[str, Any] = {"lr": options.lr, "weight_decay": options.weight_decay}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if options.optimizer == "sgd":
        return torch.optim.SGD(trained, **how)
    if options.optimizer == "adamw-8bit":
        return AdamW8bit(trained, lr=options.lr, weight_decay=options.weight_decay)
    if options.optimizer != "muon":
        return torch.optim.AdamW(trained, **how)
    of_blocks = {id(each.sharded) for each in engine_of(model).parameters if each.spec.is_block_matrix}
    matrices = [parameter for parameter in trained if id(parameter) in of_blocks]
    others = [parameter for parameter in trained if id(parameter) not in of_blocks]
    if not matrices:
        raise ValueError("optimizer is muon, and no block of the model has a matrix to train: use --optimizer adamw")
    muon = Muon(matrices, adjust_lr_fn="match_rms_adamw", **how)  # so that one learning rate serves both
    return ChainedOptimizer(muon, torch.optim.AdamW(others, **how)) if others else muon


def make_schedule(options: RunOptions, steps: int) -> Callable[[int], float]:
    """The factor of the peak learning rate at a step, counted from 0, of `steps`: transformers' schedules. They are
    written here, as importing theirs also imports PEFT and bitsandbytes.

    Their warm-up begins with a step of factor 0, which would be wasted: here it begins with their second one.
    """
    kind, warmup, floor = options.schedule, options.warmup_steps, options.lr_floor
    decay = min(max(steps // 10, 1), max(steps - warmup, 0)) if kind == "wsd" else steps - warmup
    decay_start = steps - decay

    def from_floor(factor: float) -> float:
        return factor * (1.0 - floor) + floor

    def factor_at(step: int) -> float:
        if step < warmup:
            factor = (step + 1) / warmup
            return from_floor(factor) if kind == "wsd" else factor
        if kind == "constant" or step < decay_start:
            return 1.0
        if kind == "linear":
            return max(0.0, (steps - step) / max(1, decay))
        return from_floor(0.5 * (1.0 + math.cos(math.pi * (step - decay_start) / max(1, decay))))

    return factor_at
