"""The doctor's trial: two ranks open a heap, read from each other and add to each other's memory, as in training."""

from __future__ import annotations

from collections.abc import Iterator

from .findings import OK, PROBLEM, Finding

_TIMEOUT_S = 60.0


def try_ranks() -> str | None:
    """The error of the trial, None on success. On GPUs if this process sees two, else on the CPU."""
    from ...jobs.launcher.launch import launch

    try:
        launch(add_to_each_other, ranks=2)
    except (RuntimeError, OSError) as error:
        return str(error)
    return None


def add_to_each_other() -> None:
    """A minibatch of one linear layer. Raises as training would, and RuntimeError for a wrong sum."""
    import torch
    from torch import nn

    from ...engine.minibatch import minibatch
    from ...sharding.shard_module import fully_shard

    backend = "cuda" if torch.cuda.device_count() > 1 else "cpu"
    model = fully_shard(nn.Linear(4, 4, bias=False), backend=backend, timeout=_TIMEOUT_S)
    with minibatch(model, tokens=1):
        model(torch.ones(1, 4, device=backend)).sum().backward()
    if (model.weight.grad.to_local() != 2).any():
        raise RuntimeError(f"gradients of two ranks, all 1, were summed to {model.weight.grad.to_local().tolist()}")


def check_ranks(error: str | None) -> Iterator[Finding]:
    """`error`: the result of `try_ranks`."""
    if error is None:
        yield Finding(OK, "ranks", "two trained a layer together, in memory that they share")
        return
    remedy = (
        "allow memfd_create and abstract Unix sockets in this container or sandbox; on GPUs also peer access, a short "
        "local TMPDIR for torch's sockets without those of killed ranks (symm_mem-*), PYTORCH_ALLOC_CONF without "
        "expandable_segments, and 1 GiB of /dev/shm for NCCL (docker: --shm-size)"
    )
    yield Finding(PROBLEM, "ranks", f"two ranks can't share a model: {error}", remedy)
