"""What `odc-triton doctor` makes two ranks do: open a heap, read from each other, add to each other's memory."""

from __future__ import annotations

_TIMEOUT_S = 60.0


def add_to_each_other() -> None:
    """A minibatch of one linear layer. Raises what training would, and RuntimeError for a wrong sum."""
    import torch
    from torch import nn

    from ...engine.api import minibatch
    from ...sharding.shard import fully_shard

    backend = "cuda" if torch.cuda.device_count() > 1 else "cpu"
    model = fully_shard(nn.Linear(4, 4, bias=False), backend=backend, timeout=_TIMEOUT_S)
    with minibatch(model, tokens=1):
        model(torch.ones(1, 4, device=backend)).sum().backward()
    if (model.weight.grad.to_local() != 2).any():
        raise RuntimeError(f"gradients of two ranks, all 1, were summed to {model.weight.grad.to_local().tolist()}")
