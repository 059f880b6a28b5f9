"""Starts the ranks of a job on this machine through torch's own elastic launcher."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from typing import Any


def _recorded(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, its exception written where the launcher looks for the cause."""
    from torch.distributed.elastic.multiprocessing.errors import record

    return record(function)(*args)


def launch(function: Callable[..., Any], *args: Any, ranks: int) -> list[Any]:
    """Runs `function(*args)` in `ranks` new processes and returns what each returned, by rank.

    The processes find RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in their environment, as under torchrun;
    rendezvous is on loopback. Raises RuntimeError with the first failed rank's own error, in one line, and
    KeyboardInterrupt when the launcher was told to stop (Ctrl-C, SIGTERM).
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if ranks < 1:
        raise ValueError(f"ranks is {ranks}; give at least 1")
    if ranks > 1:  # torchrun's own default, set here so that it does not have to warn about it
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        max_restarts=0,
        monitor_interval=0.1,
        local_addr="127.0.0.1",
    )
    try:
        results = elastic_launch(config, _recorded)(function, *args)
    except SignalException as signal:  # the launcher has ended the ranks
        raise KeyboardInterrupt(str(signal)) from None
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        cause = failure.message["message"] if isinstance(failure.message, dict) else failure.message
        raise RuntimeError(f"rank {rank} failed first: {cause}") from None
    return [results[rank] for rank in range(ranks)]
