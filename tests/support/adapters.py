"""Small models with adapters, for training over a base or in a single process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from odc_triton import repeating
from tests.support.families import with_lora
from tests.support.models import CASES, build

Change = Callable[[nn.Module], nn.Module]


def frozen(change: Change = lambda model: model) -> nn.Module:
    return change(build("qwen2")).requires_grad_(False)


def adapted(change: Change = lambda model: model, *, name: str = "some/folder", **lora: Any) -> nn.Module:
    """`name`: of its base, by which adapters find it."""
    model = with_lora(change(build("qwen2")), **{"targets": ["q_proj", "down_proj"]} | lora)
    model.peft_config["default"].base_model_name_or_path = name
    return model


def adapters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {key: each for key, each in model.named_parameters() if each.requires_grad}


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[tuple],
    scope: Callable[[], Any] = nullcontext,
    moments: Callable[[str], None] = lambda where: None,
) -> list[torch.Tensor]:
    """One step, in `scope()`; its losses. `moments` hears where it is."""

    def losses() -> list[torch.Tensor]:
        found = []
        moments("entry")
        with scope():
            for batch in batches:
                found.append(loss := CASES["qwen2"].loss(model, batch) / 40)
                moments("inside")
                loss.backward()
            moments("exit")
        return [each.detach() for each in found]

    found = repeating(losses)  # exact sums adapt their scales
    optimizer.step()
    optimizer.zero_grad()
    return found
