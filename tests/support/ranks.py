"""Runs a function as the ranks of a job: real processes, a real process group over gloo on loopback.

Processes are forked from a server that has already imported torch and transformers, so a rank costs a test
milliseconds. The rendezvous store is in the test's process, as it is in the launcher under torchrun, unless a test
wants it in rank 0.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import tempfile
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from tests.support.deadlines import LONG_S

_PRELOAD = ["tests.support.preload"]


@dataclass
class Outcome:
    """How one rank ended: `value` it returned, `error` it raised, or the `signal` that killed it."""

    value: Any = None
    error: str | None = None
    error_type: str | None = None
    signal: int | None = None


def _main(
    connection: Any,
    function: Callable,
    rank: int,
    world: int,
    port: int,
    in_rank_0: bool,
    ours: dict[str, str],
    args: tuple,
) -> None:
    import torch
    import torch.distributed as dist

    os.environ.update(ours, RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job starts with Ctrl-C ignored
    try:
        master = in_rank_0 and rank == 0
        store = dist.TCPStore("127.0.0.1", port, world if in_rank_0 else None, master)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        outcome = Outcome(value=function(rank, world, *args))
    except BaseException as error:
        outcome = Outcome(error=traceback.format_exc(), error_type=type(error).__name__)
        # Before the frames and their heap are freed, which ends the process after a GPU's fault.
        connection.send_bytes(pickle.dumps(outcome))
    else:
        connection.send_bytes(pickle.dumps(outcome))  # by value: `send` would pass tensors by open files
    connection.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    del store


@dataclass
class Job:
    """Running ranks. Leaving the `with` block kills those that still run."""

    processes: list[Any]
    connections: list[Any]
    store: Any
    outcomes: dict[int, Outcome] = field(default_factory=dict)

    def wait_for(self, only: list[int], timeout_s: float = LONG_S) -> list[Outcome]:
        """Waits for these ranks to end, while others may go on; a rank that does not end is an assertion error."""
        ranks = {self.connections[rank]: rank for rank in only if rank not in self.outcomes}
        while ranks:
            ready = wait(list(ranks), timeout_s)
            assert ready, f"ranks {sorted(ranks.values())} did not end within {timeout_s} s"
            for connection in ready:
                rank = ranks.pop(connection)
                try:
                    self.outcomes[rank] = pickle.loads(connection.recv_bytes())
                except EOFError:
                    self.processes[rank].join(timeout_s)
                    self.outcomes[rank] = Outcome(signal=-(self.processes[rank].exitcode or 0))
        for rank in only:
            self.processes[rank].join(timeout_s)
        return [self.outcomes[rank] for rank in only]

    def join(self, timeout_s: float = LONG_S) -> list[Outcome]:
        """Waits for all ranks to end."""
        return self.wait_for(list(range(len(self.processes))), timeout_s)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()


def fork_server() -> Any:
    """The context of processes that begin with torch imported."""
    # A library that asks at import whether there is a GPU would initialise CUDA in the fork server, and then no rank
    # could. This makes torch ask the driver's library instead.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return context


def in_own_process(function: Callable, *args: Any) -> Any:
    """Returns `function(*args)`, called in a process without threads: what forks must not be called in the test's."""
    with ProcessPoolExecutor(1, mp_context=fork_server()) as pool:
        try:
            return pool.submit(function, *args).result(LONG_S)
        except BaseException:
            for process in pool._processes.values():  # or leaving the pool waits for it
                process.kill()
            raise


def _command(words: list[str], out: str, err: str) -> int:
    from odc_triton.tools.cli import main

    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    return main(words)


def command(*words: str) -> tuple[int, str, str]:
    """The exit status of `odc-triton words`, and what it and its ranks print, without importing torch again."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = (Path(folder, name) for name in ("out", "err"))
        return in_own_process(_command, [*words], str(out), str(err)), out.read_text(), err.read_text()


def start(function: Callable, world: int, *args: Any, store_in_rank_0: bool = False) -> Job:
    """Starts `function(rank, world, *args)` on `world` ranks. The function must be importable."""
    import torch.distributed as dist

    context = fork_server()
    store = dist.TCPStore("127.0.0.1", 0, None, True)
    port = store.port
    if store_in_rank_0:
        del store
        store = None
    processes, connections = [], []
    # The fork server has the environment of the time when it was started.
    ours = {name: value for name, value in os.environ.items() if name.startswith("ODC_")}
    for rank in range(world):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_main, args=(sender, function, rank, world, port, store_in_rank_0, ours, args))
        process.start()
        sender.close()
        processes.append(process)
        connections.append(receiver)
    return Job(processes, connections, store)


def run(function: Callable, world: int, *args: Any, timeout_s: float = LONG_S) -> list[Any]:
    """Runs to the end and returns what each rank returned; any rank's error fails the test with its traceback."""
    with start(function, world, *args) as job:
        outcomes = job.join(timeout_s)
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is None, f"rank {rank}: {outcome.error}"
        assert outcome.signal is None, f"rank {rank} was killed by signal {outcome.signal}"
    return [outcome.value for outcome in outcomes]


def _in_turn(rank: int, world: int, calls: tuple) -> list[Any]:
    found = []
    for function, *args in calls:
        try:
            found.append(function(rank, world, *args))
        except Exception as error:
            raise AssertionError(f"{function.__name__}{(*args,)} failed") from error
    return found


def run_all(world: int, *calls: Callable | tuple) -> list[list[Any]]:
    """As `run` for each of `calls`, a function or (function, *args), in turn in the same ranks: what they returned.
    An error names its call.
    """
    calls = tuple(call if isinstance(call, tuple) else (call,) for call in calls)
    return [list(of_call) for of_call in zip(*run(_in_turn, world, calls), strict=True)]
