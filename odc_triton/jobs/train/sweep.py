"""Runs of `train sft` over one frozen base, which all ranks share: a free group of ranks takes the next run.

odc-triton sweep FILE --out DIR --ranks 2

Ranks wait for each other while rank 0 prepares the data, while the base loads, and at the end. Between these points
each group of `ranks_per_run` ranks works as a separate job. If its run fails, the group reports that and takes the next
one.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ...base.errors import OfRanks, describe, in_a_line
from ...checkpoint import load_pretrained_shards, meta_causal_lm
from ...checkpoint.adapted import read_config
from ...checkpoint.pretrained import expect_weights
from ...comm.barrier import Barrier
from ...comm.grid import grid_of
from ...comm.process_group import STORE
from ...engine.api import engine_of
from ...engine.module import Engine
from ...engine.serving import serving
from ...nn.operand import kept_dtype
from ...plan.cost import CostModel
from ...plan.counter import StoreCounter, store_counter
from ...sharding.agree import default_mesh, open_barrier, own_mesh, watched_barrier
from ...sharding.shard_module import fully_shard
from ..data.dataset import TokenizedDataset
from ..launcher.launch import Interrupted
from ..launcher.signals import STOPS, StopRequest, handling
from . import sft
from .job import Among, run_job
from .metrics import Metrics
from .model import frozen_options, precision, quantise
from .prepare import on_rank_0
from .run_options import RunOptions
from .stop import StopSignal
from .sweep_options import Sweep, same_of
from .sweep_report import RunEnd, write_summary

_SHOWN_S = 10.0  # between lines about a run
_OF_THE_DATA = ("data", "eval_data", "tokenizer", "token_cap", "split_sequences", "too_long", "fetch_images")
_OF_THE_DATA += ("map", "chat_template")


def check_before_start(sweep: Sweep, ranks: int) -> None:
    """Raises OSError and ValueError for errors that would occur later, with the run's name."""
    if ranks % sweep.ranks_per_run:
        raise ValueError(f"--ranks is {ranks} and --ranks-per-run {sweep.ranks_per_run}: give a multiple of it")
    if (Path(sweep.out) / "sweep.json").exists() and all(each.resume == "never" for each in sweep.runs.values()):
        raise FileExistsError(f"{sweep.out} holds another sweep: continue it with --resume auto, or give another --out")
    for name, options in sweep.runs.items():
        try:
            sft.check_before_start(options, sweep.ranks_per_run)
        except (ValueError, OSError) as error:
            raise ValueError(f"run {name}: {error}") from error


def train_all(sweep: Sweep) -> None:
    """Takes part in the sweep as this rank. Every rank of the job calls it.

    Raises RuntimeError on all ranks, after all runs, if some failed; Interrupted, once the open runs are saved, after
    SIGTERM or Ctrl-C; RankLost and DeadlineExceeded, naming the rank.
    """
    timeout = timedelta(minutes=sweep.timeout_minutes)
    mesh = default_mesh(timeout)
    sweep = replace(sweep, runs={name: each.on(mesh.device_type) for name, each in sweep.runs.items()})
    order = on_rank_0(partial(_by_cost, sweep, mesh.size()), mesh, timeout)["order"]
    counter = store_counter(timeout=timeout)
    bases = {key: _load_base(options, mesh, timeout) for key, options in _bases_of(sweep).items()}
    engines = [engine_of(each) for each in bases.values()]
    engine = engines[0]
    ranks, each = engine.grid.ranks, sweep.ranks_per_run
    first = engine.rank - engine.rank % each
    own, request = own_mesh(ranks[first : first + each], timeout), StopRequest()
    among = Among(mesh=own, base_of=lambda options: bases[_key(options)], stop=request)
    where = f"rank {first}" if each == 1 else f"ranks {first} to {first + each - 1}"
    stop, outcomes = StopSignal(engine.require_peers, request), []
    group = watched_barrier(grid_of(own), timeout)
    with handling(stop.on_signal, *STOPS), serving(next(iter(bases.values()))), group as barrier:
        openers = partial(open_barrier, grid_of(own), timeout), partial(store_counter, own.get_group(), timeout)
        runner = _Runner(sweep, among, engines, barrier, where, openers)
        for place in _turns(counter, barrier, request, len(order)):
            outcomes.append(runner.run(order[place], f"[{place + 1}/{len(order)}]"))
            gc.collect()  # the model, whose memory the next run needs
    mine = [asdict(outcome) for outcome in outcomes] if grid_of(own).rank == 0 else []
    messages = engine.exchange("results", {"rows": mine, "stop": request.signal})
    everyones = [RunEnd(**row) for theirs in messages for row in theirs["rows"]]
    if engine.rank == 0:
        write_summary(sweep, everyones)
    engine.exchange("the table of all runs is written", {})
    if stops := [theirs["stop"] for theirs in messages if theirs["stop"] is not None]:
        raise Interrupted(stops[0])
    if failed := [outcome for outcome in everyones if outcome.error]:
        names, first = ", ".join(outcome.name for outcome in failed), failed[0]
        raise RuntimeError(f"{len(failed)} of {len(order)} runs failed ({names}). {first.name}: {first.error}")


def _by_cost(sweep: Sweep, ranks: int) -> dict[str, Any]:
    """The runs' names, costliest first. Prepares all data."""
    if STORE not in os.environ:  # torchrun's ranks: no launcher has checked
        check_before_start(sweep, ranks)
    costs: dict[str, float] = {}
    prepared: dict[Any, list[Path]] = {}
    for name, options in sweep.runs.items():
        files = prepared.get(of_data := tuple(getattr(options, each) for each in _OF_THE_DATA))
        try:
            files = prepared[of_data] = files or sft.tokenize(options, _data(sweep), sweep.ranks_per_run)
        except (ValueError, OSError) as error:
            raise ValueError(f"run {name}: {error}") from error
        cost = CostModel.from_config(read_config(str(options.model)).get_text_config())
        sets = [TokenizedDataset.load(path).lengths.tolist() for path in files[: len(options.data)]]
        weights = options.data_weight or (1.0,) * len(sets)
        samples = math.fsum(weight * len(each) for weight, each in zip(weights, sets, strict=True))
        epoch = math.fsum(weight * sum(cost.samples(each)) for weight, each in zip(weights, sets, strict=True))
        taken = (options.steps or 0) * options.samples_per_rank * sweep.ranks_per_run
        costs[name] = epoch * (taken / samples if taken else options.epochs or 1.0)
    order = sorted(costs, key=lambda name: -costs[name])
    print(f"{len(order)} runs, costliest first by their samples' cost: {', '.join(order)}", flush=True)
    return {"order": order}


def _data(sweep: Sweep) -> Path:
    return Path(sweep.out) / "data"


def _key(options: RunOptions) -> tuple[Any, ...]:
    return tuple(same_of(options).values())


def _bases_of(sweep: Sweep) -> dict[tuple[Any, ...], RunOptions]:
    """One run's options by what the base depends on; the runs' own first, then teachers."""
    models = [*sweep.runs.values()]
    models += [frozen_options(run, run.teacher) for run in sweep.runs.values() if run.teacher is not None]
    return {_key(options): options for options in models}


def _load_base(options: RunOptions, mesh: DeviceMesh, timeout: timedelta) -> nn.Module:
    """The frozen model of these options, sharded over all ranks, in the dtype of compute. Collective."""
    model = meta_causal_lm(model=options.model)
    if options.quantize is not None:
        quantise(model, options.quantize, options.dtype)
    for parameter in model.requires_grad_(False).parameters():
        if options.dtype == "bf16" and parameter.dtype == torch.float32 and kept_dtype(parameter) is None:
            parameter.data = parameter.data.to(torch.bfloat16)  # without an fp32 master
    expect_weights(model)
    model = fully_shard(model, mesh=mesh, mp_policy=precision(options.dtype), timeout=timeout)
    load_pretrained_shards(model, str(options.model))
    return model


def _turns(counter: StoreCounter, barrier: Barrier, stop: StopRequest, runs: int) -> Iterator[int]:
    """The places of the runs that the ranks of `barrier` take, until none is left or a rank stops."""
    while True:
        message = {"stops": stop.signal is not None, "place": runs}
        if not message["stops"] and barrier.rank == 0:
            message["place"] = counter.add("runs", 1) - 1
        messages = barrier.exchange("take the next run", message)
        if stops := any(theirs["stops"] for theirs in messages):
            counter.add("runs", runs)  # other groups take no more either
        if stops or messages[0]["place"] >= runs:
            return
        yield messages[0]["place"]


@dataclass(frozen=True)
class _Runner:
    """The ranks that train a run together. `bases`: the engines of what all share; `barrier`: theirs.

    `openers` open their barriers and counters, which each rank numbers; one that fails may have opened fewer.
    """

    sweep: Sweep
    among: Among
    bases: list[Engine]
    barrier: Barrier
    where: str
    openers: tuple[Callable[[], Any], ...]

    def run(self, name: str, place: str) -> RunEnd:
        """One run, to its end. What it prints goes to log.txt in its folder. Raises RankLost."""
        options, shown, grid = self.sweep.runs[name], sys.stdout, grid_of(self.among.mesh)
        shown_s, log, words, is_own = time.monotonic(), Path(options.out) / "log.txt", "had ended before, after", True

        def say(words: str) -> None:
            if grid.rank == 0:
                with contextlib.suppress(OSError):  # a closed pipe ends no run
                    shown.write(f"{place} {name}: {words}\n")  # in one call, as other ranks write too
                    shown.flush()

        def on_metrics(metrics: Metrics) -> None:
            nonlocal shown_s, words
            words = "has ended after"
            if time.monotonic() - shown_s > _SHOWN_S:
                shown_s = time.monotonic()
                say(f"step {metrics['step']}, loss {metrics['loss']:.4f}")

        say(f"begins on {self.where}")
        end = RunEnd(name=name, where=self.where)
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            with open(log, "a", encoding="utf-8") as file, contextlib.redirect_stdout(file):
                metrics = sft.train_sft_among(options, self.among, data=_data(self.sweep), on_metrics=on_metrics)
            words = f"{words} step {metrics['step']}"
        except Interrupted:
            end, words = replace(end, status="stopped"), "is stopped; continue with --resume auto"
        except Exception as error:
            for base in self.bases:
                for borrower in base.borrowers:  # the other ranks of this run may wait for this one
                    borrower.abort(error)
            self.openers[0]().abort(describe(error))  # or at the next barrier, if the run has no engine yet
            self.bases[0].require_peers(f"their shards, after run {name} failed")
            with contextlib.suppress(OSError), open(log, "a", encoding="utf-8") as file:
                traceback.print_exc(file=file)
            cause = f"rank {self.bases[0].rank}: " * (grid.rank > 0) + in_a_line(error)
            end, is_own = replace(end, status="failed", error=cause), not isinstance(error, OfRanks)
        end = self._agreed(end, is_own)
        say(f"failed, and the other runs go on: {end.error}" if end.error else words)
        return end

    def _agreed(self, end: RunEnd, is_own: bool) -> RunEnd:
        """That of the group: failed if it is so on any rank, by an error that `is_own`, not a peer's. Collective."""
        messages = self.barrier.exchange("the end of a run", {"error": end.error, "is_own": is_own})
        if not (failed := [theirs for theirs in messages if theirs["error"]]):
            return end
        for opener in self.openers:
            number = opener().number
            numbers = self.barrier.exchange("the same numbers after a failed run", {"number": number})
            for _ in range(number, max(theirs["number"] for theirs in numbers)):
                opener()
        return replace(end, status="failed", error=min(failed, key=lambda theirs: not theirs["is_own"])["error"])


run_sweep = partial(run_job, train_all)
