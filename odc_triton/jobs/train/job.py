"""Training jobs around their steps: the mesh, the model sharded and loaded, signals, the process."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.elastic.multiprocessing.errors import record

from ...base.environment import joined_world, require_world
from ...base.errors import OfRanks, in_a_line
from ...checkpoint import load_pretrained_shards
from ...checkpoint.pretrained import expect_weights
from ...checkpoint.pretrained_tensors import require_written
from ...comm.grid import grid_of
from ...engine.api import engine_of
from ...nn.tuned import default_folder, load
from ...packs.enable import innermost
from ...packs.offload import offload_checkpoints
from ...plan.cost import CostModel
from ...plan.decoder import Decoder
from ...sharding.agree import default_mesh
from ...sharding.shard_module import fully_shard
from ..launcher.launch import Interrupted, run_as_rank
from ..launcher.signals import STOPS, StopRequest, handling
from ..options.config_file import with_config
from ..options.options import Parser, add_arguments, read_options
from .loop import Loop, OnMetrics
from .metrics import Metrics
from .model import build_model, compile_blocks, frozen_options, precision
from .prepare import HasEnded, Prepared, on_rank_0
from .push import push_folder
from .run import Run
from .run_options import RunOptions
from .stop import StopSignal

Options = TypeVar("Options", bound=RunOptions)


Prepare = Callable[..., Prepared]  # takes the run's folder and reads its data; collective
# The model of some options, sharded and loaded like the run's own, and the cost of samples; collective.
Sharded = Callable[..., tuple[nn.Module, CostModel]]
Start = Callable[[Any, Sharded, Prepared], Run]


@dataclass(frozen=True, kw_only=True)
class Among:
    """Other runs in the same job. `mesh`: this run's ranks; `base_of`: the frozen model of some options that all share;
    `stop`: a request to all of them.
    """

    mesh: DeviceMesh
    base_of: Callable[[RunOptions], nn.Module]
    stop: StopRequest


def train(
    options: RunOptions, prepare: Prepare, start: Start, on_metrics: OnMetrics | None, among: Among | None = None
) -> Metrics:
    """Runs a job on this rank to its end: prepares, shards, runs the result of `start`, pushes the model. Returns the
    last metrics.
    """
    timeout = timedelta(minutes=options.timeout_minutes)
    mesh = default_mesh(timeout, replicas=options.replicas) if among is None else among.mesh
    options.require_replicas(mesh.size(0) if mesh.ndim == 2 else 1, mesh.size())
    metrics = _train(options, mesh, prepare, start, on_metrics, among)
    if (repo_id := options.push_to_hub) is not None:
        folder, private = options.model_folder, options.hub_private
        on_rank_0(lambda: {"address": push_folder(folder, repo_id, private=private)}, mesh, timeout)
    return metrics


def _train(
    options: RunOptions,
    mesh: DeviceMesh,
    prepare: Prepare,
    start: Start,
    on_metrics: OnMetrics | None,
    among: Among | None,
) -> Metrics:
    try:
        prepared = prepare(options, mesh=mesh)
    except HasEnded as ended:
        return ended.metrics
    options = replace(options, dtype=prepared.identity["dtype"])
    try:
        base_of = None if among is None else among.base_of
        run = start(options, partial(_sharded, prepared=prepared, mesh=mesh, base_of=base_of), prepared)
        stop = StopSignal(run.engine.require_peers, None if among is None else among.stop)
        loop = Loop(run, prepared, stop, on_metrics, is_shown=among is None)
        with handling(stop.on_signal, *STOPS):
            try:
                return loop.run_to_the_end()
            except BaseException as error:
                lost = None if stop.signal is None else lost_within(error)
                run.engine.abort(lost or error)
                if lost is not None and lost is not error:
                    raise lost from error
                raise
            finally:  # after the peers were notified
                run.close()
                loop.close()
    finally:
        if prepared.folder is not None:
            prepared.folder.release()


def lost_within(error: BaseException) -> OfRanks | None:
    """The loss of a peer that `error` came from: a signal's handler raises it anywhere, and torch may wrap it."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, OfRanks):
        found = found.__cause__ or found.__context__
    return found


def _sharded(
    options: RunOptions,
    *,
    frozen: bool = False,
    prepared: Prepared,
    mesh: DeviceMesh,
    base_of: Callable[[RunOptions], nn.Module] | None = None,
) -> tuple[nn.Module, CostModel]:
    base = None if base_of is None else base_of(options)
    rank, timeout = grid_of(mesh).rank, timedelta(minutes=options.timeout_minutes)
    sizes = {"longest": prepared.longest, "largest_token": prepared.largest_token}
    on_gpu = mesh.device_type == "cuda"
    memory_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory if on_gpu else 0
    how: dict[str, Any] = {"rank": 1 if frozen else rank, "memory_bytes": memory_bytes}  # only rank 0 prints
    model, cost = build_model(options, prepared.tokenizer, **sizes, **how)
    if frozen:
        model.requires_grad_(False)
    elif options.compile:
        compile_blocks(model)
    if options.model is not None:
        expect_weights(model)
    exact = options.exact or None  # None: by torch.use_deterministic_algorithms
    how = {"timeout": timeout, "exact": exact, "expert_cache_bytes": options.expert_cache}
    model = fully_shard(model, mesh=mesh, mp_policy=precision(options.dtype), base=base, **how)
    require_written(model)
    if not frozen:
        cost = _measured(model, options, cost, rank)
    if options.offload_activations and not frozen:
        offload_checkpoints(model)
    torch.manual_seed(options.seed + rank)  # dropout differs between ranks
    if options.model is not None and base is None:
        load_pretrained_shards(model, options.model)
    return model, cost


def load_frozen(options: RunOptions, sharded: Sharded, model: str | None = None) -> nn.Module:
    """`model`, or the run's own as it starts, sharded, without adapters and dropout, never stepped. Collective."""
    made, _ = sharded(frozen_options(options, model), frozen=True)
    return made.eval()


def load_teacher(options: RunOptions, sharded: Sharded) -> nn.Module | None:
    return None if options.teacher is None else load_frozen(options, sharded, options.teacher)


def run_job(job: Callable[[Options], Metrics], options: Options) -> Metrics:
    """`job(options)` in a process that the launcher started. A request to stop exits it with 128 + the signal."""
    try:
        return job(options)
    except Interrupted as stop:
        sys.stdout.flush()
        sys.exit(128 + stop.signal)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _measured(model: nn.Module, options: RunOptions, cost: CostModel, rank: int) -> CostModel:
    """With the costs of attention and of recurrent layers' rules that `odc-triton tune` measured here, by rank 0's
    table. Collective.
    """
    engine, factors, config = engine_of(model), [1.0, 1.0], innermost(model).config.get_text_config()
    if rank == 0:
        tuned = load(engine.place(), default_folder())
        if tuned.unused is not None and not options.replace_layers:  # else those layers warn of it
            warnings.warn(tuned.unused, stacklevel=2)
        decoder, dtype = Decoder.of(config), "bfloat16" if options.dtype == "bf16" else "float32"
        factors = [tuned.attention.get(f"{dtype}: {words}", 1.0) for words in (decoder.words, decoder.rule_words)]
    factors = engine.exchange("measured costs", {"factors": factors})[0]["factors"]
    for name, factor in zip(("attention", "the recurrent layers' rule"), factors, strict=True):
        if rank == 0 and factor != 1.0:
            print(f"{name} is planned by its measured cost, {factor:.2f} of its FLOPs'", flush=True)
    if factors[1] != 1.0:
        cost = CostModel.from_config(config, rule=factors[1])
    return replace(cost, quadratic=factors[0] * cost.quadratic)


def main_of(kind: type[Options], run: Callable[[Options], Metrics]) -> None:
    """The main function of a rank under `torchrun -m odc_triton.train.JOB`: the command line, the job, the status."""
    run_as_rank(partial(_main, kind, run))


def _main(kind: type[Options], run: Callable[[Options], Metrics]) -> None:
    parser = Parser(prog=f"odc_triton.train.{kind.job}", description=kind.__doc__)
    add_arguments(parser, kind, config=True)
    try:
        given = with_config(kind, vars(parser.parse_args()))
        require_world(given.get("ranks"), joined_world() or 1)
        options = read_options(kind, given)
    except ValueError as error:
        parser.error(str(error))
    run_here(run, options)


def run_here(run: Callable[[Options], Metrics], options: Options) -> None:
    """Runs as a rank that torchrun, or another program, started. Prints an error and exits with status 1."""
    try:
        record(run)(options)  # so that torchrun's summary has the error
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        print(f"rank {os.environ.get('RANK', 0)}: {in_a_line(error)}", file=sys.stderr)
        sys.exit(1)
