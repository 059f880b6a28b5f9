"""The modes of a model's modules, training or evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

# By it bitsandbytes packs a 4-bit layer's codes once more in evaluation on some CPUs, for good, and rounds its scales.
_MODES = ("training", "support_avx512bf16_for_cpu")


@contextmanager
def evaluating(model: nn.Module, *, but: nn.Module | None = None) -> Iterator[None]:
    """`model` in evaluation mode; afterwards each module has the mode that it had, as another model may share it.
    Weights stay as they are. `but`: a head, which if fused would compute full logits in evaluation.
    """
    kept = [(each, name, vars(each)[name]) for each in model.modules() for name in _MODES if name in vars(each)]
    for module, name, _ in kept:
        setattr(module, name, module.training and name == "training")
    model.eval()
    if but is not None:
        but.training = True  # not `train()`, for dropout of adapters
    try:
        yield
    finally:
        for module, name, value in kept:
            setattr(module, name, value)
