"""Bytes of rank 0 that a plan of memory adds up, by scheme: shards, and the peaks of whole units (peaks.py)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from ...comm.layout import ALIGNMENT_BYTES, EXACT, ParameterSpec, aligned, make_layout, shard_rows
from ...optim import adamw8bit
from ...optim import buffers as muon_buffers
from ...plan.decoder import Decoder
from ...sequence import buffers as kv_buffers
from .peaks import ROOT, Units, fsdp2_whole_gradient_bytes, gathered_bytes, whole_gradient_bytes

# Per trainable parameter: tensors of the master's shape and dtype that are kept, and bytes of scalars.
OPTIMIZER_STATES = {"adamw": (2, 4), "sgd": (0, 0), "muon": (1, 0), "none": (0, 0)}


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The ranks that parameters are split over: frozen ones over `world`, those that train over `run_ranks` of them;
    and again over `replicas`.
    """

    world: int
    run_ranks: int
    replicas: int = 1

    def shard_bytes(self, specs: Iterable[ParameterSpec], dtype_field: str, alignment_bytes: int = 1) -> int:
        """Of rank 0, in the dtype that this field of a spec names."""
        total = 0
        for spec in specs:
            ranks = self.world if spec.reduce_dtype is None else self.run_ranks
            _, in_shard = shard_rows(spec.shape[0], ranks, 0)
            rows = shard_rows(in_shard, self.replicas, 0)[1:]
            n_bytes = math.prod((*rows, *spec.shape[1:])) * element_bytes(getattr(spec, dtype_field))
            total += aligned(n_bytes, alignment_bytes)
        return total


def element_bytes(dtype: str) -> int:
    return getattr(torch, dtype).itemsize


def trained_of(specs: Iterable[ParameterSpec]) -> list[ParameterSpec]:
    return [spec for spec in specs if spec.reduce_dtype is not None]


def unit_bytes(specs: Iterable[ParameterSpec], dtype_field: str) -> Units:
    """Of each unit's whole parameters, by the unit's name; the root is always included."""
    units: Units = defaultdict(int, {ROOT: 0})
    for spec in specs:
        units[spec.unit] += math.prod(spec.shape) * element_bytes(getattr(spec, dtype_field))
    return units


def of_odc(
    specs: list[ParameterSpec],
    whole: list[ParameterSpec],
    made: list[ParameterSpec],
    by_muon: list[ParameterSpec],
    ranks: Ranks,
    backend: str,
) -> dict[str, int]:
    """Fields of the plan. `whole`: what is gathered; `made`: what has whole gradients; `by_muon`: what Muon steps."""
    world, run, apart = ranks.world, ranks.run_ranks, backend == "cuda"
    in_replica = replace(ranks, replicas=1)
    trained = trained_of(specs)
    # On CUDA each rank allocates its own region, of the same size on all ranks, with every shard aligned in it.
    # On the CPU there is one mapping, in which the shards of a parameter are contiguous; runs have one each.
    alignment = ALIGNMENT_BYTES if apart else 1
    compute_shard = in_replica.shard_bytes(specs, "compute_dtype", alignment)
    gradient_shard = in_replica.shard_bytes(trained, "reduce_dtype", alignment)
    in_run, base = (specs, []) if run == world else (trained, [spec for spec in specs if spec.reduce_dtype is None])
    of_replica = world * (compute_shard + gradient_shard)
    if not apart:
        dtypes = {dtype for spec in specs for dtype in (spec.compute_dtype, spec.reduce_dtype) if dtype is not None}
        itemsizes = {dtype: element_bytes(dtype) for dtype in dtypes}
        parts = ((world // run, in_run), (1, base))
        of_replica = sum(n * make_layout(some, world=run, itemsizes=itemsizes).size_bytes for n, some in parts)
    shapes = [spec.shape for spec in by_muon]
    muon_bytes = aligned(muon_buffers.buffer_regions(shapes, world=run, apart=True)[1])
    of_run = run * muon_bytes if apart else muon_buffers.buffer_regions(shapes, world=run, apart=False)[1]
    of_replica += world // run * of_run
    with_gradient = trained_of(made)
    tied = unit_bytes([spec for spec in with_gradient if len(spec.names) > 1], "compute_dtype")
    return {
        "compute_shard_bytes": compute_shard,
        "gradient_shard_bytes": gradient_shard,
        "master_shard_bytes": ranks.shard_bytes([spec for spec in specs if spec.has_own_master], "master_dtype"),
        "gradient_cast_bytes": ranks.shard_bytes([spec for spec in trained if _copies_gradient(spec)], "master_dtype"),
        "gathered_bytes": gathered_bytes(unit_bytes(whole, "compute_dtype")) if apart else 0,
        "transient_gradient_bytes": whole_gradient_bytes(
            unit_bytes(with_gradient, "compute_dtype"), tied=sum(tied.values())
        ),
        "muon_bytes": muon_bytes,
        "job_shared_bytes": of_replica * ranks.replicas,
    }


def _copies_gradient(spec: ParameterSpec) -> bool:
    """True if `.grad` is a separate tensor. That of an exact sum is fp32 in the sum's own memory."""
    reduced = "float32" if spec.reduce_dtype == EXACT else spec.reduce_dtype
    return reduced != spec.master_dtype


def of_fsdp2(specs: list[ParameterSpec], ranks: Ranks, *, resharded: bool) -> dict[str, int]:
    """Fields of the plan. `resharded`: blocks are, after forward."""
    trained = trained_of(specs)
    units = unit_bytes(specs, "compute_dtype")
    gathered = gathered_bytes(units) if resharded else sum(units.values())
    gradient_shard = ranks.shard_bytes(trained, "master_dtype")
    # The root's parameters that are registered before the first block get their gradients after the blocks.
    first_block = next((i for i, spec in enumerate(trained) if spec.unit != ROOT), 0)
    late = [spec for i, spec in enumerate(trained) if i >= first_block or len(spec.names) > 1]
    whole_gradients = fsdp2_whole_gradient_bytes(
        unit_bytes(trained, "compute_dtype"),
        unit_bytes(trained, "reduce_dtype"),
        late_root=unit_bytes(late, "compute_dtype")[ROOT],
        resharded=resharded,
        gathered_bytes=gathered,
        shard_bytes=gradient_shard,
    )
    return {
        "gradient_shard_bytes": gradient_shard,
        "master_shard_bytes": ranks.shard_bytes(specs, "master_dtype"),
        "gathered_bytes": gathered,
        "transient_gradient_bytes": whole_gradients,
    }


def state_bytes(ranks: Ranks, optimizer: str, specs: Sequence[ParameterSpec]) -> int:
    if optimizer == "adamw-8bit":
        return sum(adamw8bit.state_bytes(spec.shape, (ranks.run_ranks, ranks.replicas)) for spec in specs)
    tensors, scalar_bytes = OPTIMIZER_STATES[optimizer]
    return tensors * ranks.shard_bytes(specs, "master_dtype") + scalar_bytes * len(specs)


def split_buffer_bytes(
    decoder: Decoder, dtype: str, *, tokens: int, cuts: int, world: int, in_flight: int | None, gradients: bool
) -> int:
    """Of one rank."""
    widths, found = (decoder.key_width, decoder.value_width), decoder.recurrent
    layers = [kv_buffers.LayerShape(heads=decoder.kv_heads, widths=widths, dtype=dtype)] * decoder.attending
    if found is not None:
        kernel = {"rows_per_cut": found.kernel - 1, "dtype": dtype}
        layers += [kv_buffers.LayerShape(heads=1, widths=(found.channels,), **kernel)] * decoder.recurring
    if found is not None and found.heads:
        how = {"rows_per_cut": 1, "states": True, "dtype": "float64" if dtype == "float64" else "float32"}
        pair = (found.key_width**2 if found.is_paired else 1, found.key_width * found.value_width)
        layers += [kv_buffers.LayerShape(heads=found.heads, widths=pair, **how)] * decoder.recurring
    sizes = {"tokens": tokens, "cuts": cuts, "world": world, "gradients": gradients}
    return kv_buffers.buffer_regions(layers, **sizes, in_flight=in_flight or len(layers), apart=True)[1]
