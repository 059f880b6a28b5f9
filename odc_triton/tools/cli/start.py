"""Starts the ranks of a training job, after its check, so that slow imports are done once."""

from __future__ import annotations

import os
import signal
from contextlib import AbstractContextManager
from importlib import import_module
from types import ModuleType
from typing import Any, NoReturn

from ...base.environment import joined_world
from ...jobs.launcher.launch import LocalRanks, run_as_rank, warn_of_few_cores
from ...jobs.launcher.signals import STOPS, handling
from ..memory.advice import advising

_GPU_DEVICES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")


def report_stopped(number: int) -> int:
    """Reports on stderr that a signal stopped the command; returns its exit status."""
    os.write(2, f"odc-triton: stopped by {signal.Signals(number).name}\n".encode())
    return 128 + number


def ending_at_once() -> AbstractContextManager[None]:
    """A stop request ends the process at once: during an import KeyboardInterrupt is lost, or becomes another error."""
    return handling(lambda number, _: os._exit(report_stopped(number)), *STOPS)


def _join(name: str, run: str, options: Any, world: int) -> NoReturn:
    """Calls the function `run` of the module `name` as one rank of the world that torchrun started this process in."""
    from ...jobs.train.job import run_here

    run_as_rank(lambda: run_here(advising(options, world)(getattr(import_module(name), run)), options))


def default_ranks(device: str = "auto") -> int:
    """One for each GPU that this process sees; without one, or on the CPU, 1."""
    if device == "cpu" or not any(map(os.path.exists, _GPU_DEVICES)):
        return 1
    return max(import_module("torch").cuda.device_count(), 1)


def start_job(name: str, run: str, options: Any, *, ranks: int) -> None:
    """Checks the options by `check_before_start` of the module `name`, then calls its function `run` on every rank;
    under torchrun as one of its ranks, which have been checked by nobody.
    """
    if (world := joined_world()) is not None:
        _join(name, run, options, world)
    has_gpu = any(map(os.path.exists, _GPU_DEVICES))
    job = LocalRanks(ranks, method="spawn" if has_gpu else "fork")
    with advising(options, ranks), job, handling(job.on_signal, *STOPS):
        module = _start_and_check(job, name, options) if has_gpu else _check_and_fork(job, name, options)
        warn_of_few_cores(ranks)
        job.run(getattr(module, run), options, timeout_s=60 * options.timeout_minutes)


def _start_and_check(job: LocalRanks, name: str, options: Any) -> ModuleType:
    """Ranks import the module while this process imports it and checks; a failed check ends them."""
    job.start(preload=name)
    with ending_at_once():
        module = import_module(name)
        module.check_before_start(options, job.ranks)
    return module


def _check_and_fork(job: LocalRanks, name: str, options: Any) -> ModuleType:
    """The module is imported once, see [Note: forked ranks]. The check is in a fork too, as it may start threads."""
    with ending_at_once():
        module = import_module(name)
    with LocalRanks(1, method="fork") as check:
        check.start()
        check.run(module.check_before_start, options, job.ranks)
    job.start()
    return module
