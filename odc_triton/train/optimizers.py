"""The optimizers that `--optimizer` names."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from ..engine.api import engine_of
from ..optim import Muon, Together
from .sft_options import SftOptions


def make_optimizer(model: nn.Module, options: SftOptions) -> Optimizer:
    """The run's optimizer of a sharded model, all of whose groups have the same learning rate.

    Raises ValueError where Muon has no matrix to step.
    """
    how = {"lr": options.lr, "weight_decay": options.weight_decay}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if options.optimizer != "muon":
        return {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[options.optimizer](trained, **how)
    of_blocks = {id(each.sharded) for each in engine_of(model).parameters if each.spec.is_block_matrix}
    matrices = [parameter for parameter in trained if id(parameter) in of_blocks]
    others = [parameter for parameter in trained if id(parameter) not in of_blocks]
    if not matrices:
        raise ValueError("optimizer is muon, and no block of the model has a matrix to train: use --optimizer adamw")
    muon = Muon(matrices, adjust_lr_fn="match_rms_adamw", **how)  # so that one learning rate serves both
    return Together(muon, torch.optim.AdamW(others, **how)) if others else muon
