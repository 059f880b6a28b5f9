"""The optimizers of `--optimizer`, and the learning-rate schedules of `--schedule`."""

from __future__ import annotations

from collections.abc import Callable

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
    how = {"lr": options.lr, "weight_decay": options.weight_decay}
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
    """The factor of the peak learning rate at a step, counted from 0, of `steps`: transformers' schedules.

    Their warm-up begins with a step of factor 0, which would be wasted: here it begins with their second one.
    """
    from transformers import optimization

    warmup = {"num_warmup_steps": options.warmup_steps}
    ends = {"num_training_steps": steps}
    unused = torch.optim.SGD([torch.zeros(1)], lr=1.0)  # they need one, and only their factors are used
    if options.schedule == "cosine":
        made = optimization.get_cosine_with_min_lr_schedule_with_warmup(
            unused, **warmup, **ends, min_lr_rate=options.lr_floor
        )
    elif options.schedule == "wsd":
        decay = min(max(steps // 10, 1), max(steps - options.warmup_steps, 0))
        made = optimization.get_wsd_schedule(
            unused, **warmup, **ends, num_decay_steps=decay, min_lr_ratio=options.lr_floor
        )
    elif options.schedule == "linear":
        made = optimization.get_linear_schedule_with_warmup(unused, **warmup, **ends)
    else:
        made = optimization.get_constant_schedule_with_warmup(unused, **warmup)
    (factor,) = made.lr_lambdas
    return lambda step: factor(step + (step < options.warmup_steps))
