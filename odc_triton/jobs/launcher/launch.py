"""Starts the ranks of a job on this machine and says why it ended.

Jobs on several machines use torchrun. On one machine this launcher does more: ranks die with it, it reports the root
cause in one line, and its store listens on no network interface.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import math
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from importlib import import_module
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal, NoReturn

from ...base.errors import OfRanks, in_a_line
from .signals import STOPS, StopRequest, handling

_ALONE_S = 1.0  # for the other ranks to find out which rank failed
_GRACE_S = 10.0  # from SIGTERM to SIGKILL
_EXIT_S = 3.0
_PR_SET_PDEATHSIG = 1


class Interrupted(KeyboardInterrupt):
    """The job ended because `signal` asked it to stop. Command lines end with status 128 + `signal`."""

    def __init__(self, number: int) -> None:
        self.signal = signal.Signals(number)
        super().__init__(f"stopped by {self.signal.name}")


class RemoteTraceback(Exception):
    """A rank's traceback, as text: the cause of an error of `launch`."""

    def __str__(self) -> str:
        return "\n" + self.args[0]


@dataclass(frozen=True, kw_only=True)
class _Failure:
    """A rank's failure. `about`: the other ranks that its error names; None if it concerns itself."""

    rank: int
    text: str
    trace: str = ""
    about: frozenset[int] | None = None


def die_with_parent(parent_pid: int | None = None, number: int = signal.SIGKILL) -> None:
    """Asks the kernel to send this process a signal when its parent ends. `parent_pid`: its pid at the start."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
    if parent_pid is not None and os.getppid() != parent_pid:  # it died before that call
        os._exit(1)


def die_with_torchrun() -> None:
    """A rank of torchrun dies with it: it might wait for torchrun's store."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent()


def run_as_rank(main: Callable[[], Any]) -> NoReturn:
    """Calls `main` as all that this process does, a rank that torchrun or another program started."""
    die_with_torchrun()
    try:
        main()
    except SystemExit as end:
        end_process(_status_of(end))
    end_process(0)


def _status_of(end: SystemExit) -> int:
    """The exit status that `sys.exit` asked for; prints the text that it was given instead, as Python does."""
    if isinstance(end.code, str):
        print(end.code, file=sys.stderr, flush=True)
    return end.code if isinstance(end.code, int) else int(end.code is not None)


def end_process(status: int) -> NoReturn:
    """Ends a rank's process.

    [Note: how a rank ends] Not by ending the interpreter: that destroys what torch's own threads still use, and has
    aborted a process that had done all its work. All exit functions together have `_EXIT_S` seconds: a tracker's may
    wait for a server that never answers.
    """
    late = threading.Timer(_EXIT_S, os._exit, [status])
    late.daemon = True
    late.start()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BrokenPipeError):  # nobody reads it any more, which is no failure of this rank
            stream.flush()
    os._exit(status)


def launch(function: Callable[..., Any], *args: Any, ranks: int) -> list[Any]:
    """Runs `function(*args)` in `ranks` new processes and returns what each returned, by rank.

    The processes find RANK, WORLD_SIZE and LOCAL_RANK in their environment, as under torchrun, and each other through
    `process_group.rendezvous_url()`, which no other user can reach. They die with this process. When one fails the
    others have a second to find out, then they get SIGTERM, and SIGKILL 10 s later.
    SIGTERM and Ctrl-C are passed on to the ranks, which may take their time to end; a second one kills them.

    Raises RuntimeError with the error of the rank that failed first, in one line (without naming a rank if all failed
    alike); Interrupted, a KeyboardInterrupt, if the job was asked to stop.
    """
    with LocalRanks(ranks) as job, handling(job.on_signal, *STOPS):  # also between the two
        job.start()
        return job.run(function, *args)


def warn_of_few_cores(ranks: int) -> None:
    """Warns on stderr if there are more ranks than cores on a machine without a GPU."""
    import torch

    cores = len(os.sched_getaffinity(0))
    if ranks > cores and not torch.cuda.is_available():
        print(f"odc-triton: {ranks} ranks share {cores} cores and will be slow; give --ranks {cores}", file=sys.stderr)


@contextlib.contextmanager
def _store() -> Iterator[str]:
    """The name of a rendezvous store that lives in this process."""
    from ...comm.local_store import StoreServer

    name = f"odc-store-{uuid.uuid4().hex}"
    server = StoreServer(name)
    try:
        yield name
    finally:
        server.close()


class _End(Enum):
    """The end of a rank's process."""

    DONE = auto()
    STOPPED = auto()  # as the job was asked to: an error of another rank about this one is no failure
    KILLED = auto()  # by this launcher
    FAILED = auto()


# By exit code: if nothing had happened; if the job was asked to stop; if another rank had failed. All others: FAILED.
_ENDS = {
    0: (_End.DONE, _End.DONE, _End.DONE),
    128 + signal.SIGTERM: (_End.STOPPED, _End.STOPPED, _End.STOPPED),  # all ranks agreed to stop
    128 + signal.SIGINT: (_End.STOPPED, _End.STOPPED, _End.STOPPED),
    -signal.SIGINT: (_End.STOPPED, _End.STOPPED, _End.STOPPED),  # Ctrl-C before the rank had a handler
    -signal.SIGTERM: (_End.FAILED, _End.STOPPED, _End.KILLED),
    -signal.SIGKILL: (_End.FAILED, _End.KILLED, _End.KILLED),
}


@dataclass
class _RankProcess:
    process: Any
    connection: Connection
    message: bytes | None = None  # the pickled return value, or b"" if there is none; None until it is read
    end: _End | None = None  # None while it runs


class LocalRanks:
    """The ranks' processes: `start`, then `run`. Leaving the block kills them.

    [Note: forked ranks] With `method="fork"` ranks have what this process has imported, and so begin at once. It is for
    a process without threads that has not asked for GPUs: CUDA can't be used in the forks of one that has.
    """

    def __init__(self, ranks: int, *, method: Literal["spawn", "fork"] = "spawn") -> None:
        if ranks < 1:
            raise ValueError(f"ranks is {ranks}; give at least 1")
        self.ranks = ranks
        self._method = method
        self._started: dict[int, _RankProcess] = {}
        self._stop = StopRequest()
        self._failures: list[_Failure] = []
        self._failed_s: float | None = None  # when the first rank failed
        self._done_s: float | None = None  # when the first rank had done its work
        if ranks > 1:  # as torchrun does: the ranks inherit it
            os.environ.setdefault("OMP_NUM_THREADS", "1")

    def __enter__(self) -> LocalRanks:
        return self

    def __exit__(self, *_: object) -> None:
        self._signal_all(signal.SIGKILL)
        for each in self._running.values():
            each.process.join()
            each.connection.close()

    @property
    def _running(self) -> dict[int, _RankProcess]:
        return {rank: each for rank, each in list(self._started.items()) if each.end is None}

    def start(self, preload: str | None = None) -> None:
        """Starts the processes, which import the module `preload` and wait for `run`. Raises Interrupted."""
        if self._method == "spawn":
            resource_tracker.ensure_running()  # else the first start does it, which unblocks Ctrl-C
        with handling(self.on_signal, *STOPS):
            for rank in range(self.ranks):
                self._start(rank, preload)
        if self._stop.signal is not None:
            raise Interrupted(self._stop.signal)

    def _start(self, rank: int, preload: str | None) -> None:
        context = multiprocessing.get_context(self._method)
        ours, theirs = context.Pipe()
        process = context.Process(target=_rank, args=(theirs, preload, _environment(rank, self.ranks), os.getpid()))
        # Until `_rank` has handlers. Before that, a process forked has ours, and one spawned dies of SIGTERM.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS if self._method == "fork" else [signal.SIGINT])
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        theirs.close()
        self._started[rank] = _RankProcess(process, ours)
        if self._stop.signal is not None:  # it came before this rank was there
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, self._stop.signal)

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = math.inf) -> list[Any]:
        """Returns what `function(*args)` returns, by rank; raises as `launch` does.

        `timeout_s`: for all ranks to end after one has done its work. It is for functions that end with a barrier.
        """
        work = pickle.dumps((function, args))
        with handling(self.on_signal, *STOPS), _store() as store:  # it has threads: after the forks
            from ...comm.memory.rendezvous import STORE

            for each in self._running.values():
                with contextlib.suppress(OSError):  # that rank has died: see `_on_end`
                    each.connection.send(({STORE: store}, work))
            self._wait(timeout_s)
        self._raise_failure()
        messages = (self._started[rank].message for rank in range(self.ranks))
        return [pickle.loads(each) if each else None for each in messages]  # None of a rank that exited with status 0

    def on_signal(self, number: int, _: Any = None) -> None:
        """Passes a signal on to the ranks; a second request kills them."""
        request = self._stop.on_signal(number)
        if request != "same":
            self._signal_all(number if request == "first" else signal.SIGKILL)

    def _signal_all(self, number: int) -> None:
        for each in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(each.process.pid, number)

    def _wait(self, timeout_s: float) -> None:
        """Waits until no rank is running."""
        steps = [(_ALONE_S, signal.SIGTERM), (_ALONE_S + _GRACE_S, signal.SIGKILL)]
        while running := self._running:
            now_s = time.monotonic()
            if self._failed_s is not None and steps and now_s - self._failed_s > steps[0][0]:
                self._signal_all(number := steps.pop(0)[1])
                if number == signal.SIGKILL:
                    with contextlib.suppress(OSError):
                        print(f"ranks {[*running]} were given {_GRACE_S:g} s to end: killed", file=sys.stderr)
            if self._failed_s is None and self._done_s is not None and now_s - self._done_s > timeout_s:
                self._fail_late(timeout_s)
            unread = [each.connection for each in running.values() if each.message is None]
            wait([each.process.sentinel for each in running.values()] + unread, timeout=0.2)
            for rank, each in running.items():
                if each.message is None and each.connection.poll():
                    self._read(rank)
                if not each.process.is_alive():
                    self._on_end(rank)

    def _read(self, rank: int) -> None:
        each = self._started[rank]
        each.message = b""
        with contextlib.suppress(EOFError, ConnectionResetError):  # it died: see `_on_end`
            kind, content = pickle.loads(each.connection.recv_bytes())
            if kind == "failure":
                self._fail(content)
            else:
                each.message = content
                self._done_s = self._done_s or time.monotonic()

    def _on_end(self, rank: int) -> None:
        each = self._started[rank]
        each.process.join()
        if each.message is None:
            self._read(rank)
        each.connection.close()
        code = each.process.exitcode
        column = 1 if self._stop.signal is not None else 2 if self._failures else 0
        each.end = _ENDS.get(code, (_End.FAILED,) * 3)[column]
        if each.end is _End.STOPPED and self._stop.signal is None:  # only ranks received the signal
            if code == -signal.SIGINT:
                self.on_signal(signal.SIGINT)  # the other ranks don't know
            else:
                self._stop.signal = code - 128
        if each.end in (_End.DONE, _End.STOPPED):
            self._done_s = self._done_s or time.monotonic()
        if each.end is _End.FAILED and all(failure.rank != rank for failure in self._failures):
            self._fail(_Failure(rank=rank, text=how_it_ended(code)))

    def _fail_late(self, timeout_s: float) -> None:
        """Kills the ranks that have not ended."""
        for rank, each in self._running.items():
            what = "is stopped and has not" if _is_stopped(each.process.pid) else "has not"
            text = f"its process {what} ended {timeout_s:g} s after the first rank had done its work"
            self._fail(_Failure(rank=rank, text=text))
        self._signal_all(signal.SIGKILL)

    def _fail(self, failure: _Failure) -> None:
        self._failures.append(failure)
        self._failed_s = self._failed_s or time.monotonic()

    def _raise_failure(self) -> None:
        stopped = {rank for rank, each in self._started.items() if each.end is _End.STOPPED}
        failures = [each for each in self._failures if not each.about or not each.about <= stopped]
        if failures:
            cause = next((each for each in failures if each.about is None), failures[0])
            all_alike = len(failures) == self.ranks and len({each.text for each in failures}) == 1
            error = RuntimeError(cause.text if all_alike else f"rank {cause.rank} failed first: {cause.text}")
            raise error from (RemoteTraceback(cause.trace) if cause.trace else None)
        if self._stop.signal is not None:
            raise Interrupted(self._stop.signal)


_HINTS = {
    "SIGKILL": " (out of memory? `dmesg` names what the kernel killed)",
    "SIGBUS": " (a page of its memory could not be had: the machine or its container is out of memory, /dev/shm or a "
    "disk is full, or a file that it had mapped, of data or weights, was truncated while it was read)",
    "SIGSEGV": " (a crash in native code: PYTHONFAULTHANDLER=1 shows where)",
    "SIGABRT": " (native code gave up: it may have said why on stderr)",
    "SIGILL": " (torch used an instruction that this CPU lacks; virtual machines may announce AMX and not have it: set "
    "ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16)",
}


def how_it_ended(exit_code: int) -> str:
    """Why a process ended that was not asked to, by its exit code (minus a signal's number)."""
    if exit_code >= 0:
        return f"its process ended with status {exit_code}"
    name = {each.value: each.name for each in signal.Signals}.get(-exit_code, f"signal {-exit_code}")
    return f"its process was killed by {name}{_HINTS.get(name, '')}"


def _is_stopped(pid: int) -> bool:
    """A process is stopped, by SIGSTOP or a debugger."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] in "Tt"


def _environment(rank: int, ranks: int) -> dict[str, str]:
    sizes = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    return {name: str(value) for name, value in sizes.items()}


def _rank(connection: Connection, preload: str | None, environment: dict[str, str], parent_pid: int) -> None:
    """A rank's process.

    Until the work has its own handler, Ctrl-C ends the process as SIGTERM does. Before this function the interpreter
    would print a KeyboardInterrupt; in an import it is lost or becomes another error.
    """
    die_with_parent(parent_pid)
    for number in STOPS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    os.environ.update(environment)
    status = 0
    try:
        if preload is not None:
            import_module(preload)
        variables, work = connection.recv()
        os.environ.update(variables)
        function, args = pickle.loads(work)  # imports what the work needs
        message = "value", pickle.dumps(function(*args))
    except Exception as error:
        text = in_a_line(error)
        rank = int(environment["RANK"])
        about = frozenset(error.ranks) if isinstance(error, OfRanks) else None
        message = "failure", _Failure(rank=rank, text=text, trace=traceback.format_exc(), about=about)
    except KeyboardInterrupt as stop:
        message, status = None, 128 + (stop.signal if isinstance(stop, Interrupted) else signal.SIGINT)
    except SystemExit as end:
        message, status = None, _status_of(end)
    if message is not None:
        with contextlib.suppress(BrokenPipeError):
            connection.send_bytes(pickle.dumps(message))
    connection.close()
    end_process(status)
